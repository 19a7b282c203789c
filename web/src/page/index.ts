/**
 * nearfar in the browser: `createEngine(url)` loads an artifact for WebGPU or WebAssembly and answers behind
 * OpenAI's interface.
 */

export { type CachedModel, cachedModels, deleteModel } from "./cached.js";
export { createEngine, type EngineOptions, type WorkerPort } from "./client.js";
export * from "./exports.js";
export { type SharedOptions, sharedEngine } from "./shared.js";
