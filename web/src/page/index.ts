/**
 * nearfar in the browser: `createEngine(url)` loads an artifact for WebGPU or WebAssembly and answers behind
 * OpenAI's interface.
 */

export type { WorkerPort } from "../protocol/ports.js";
export { type CachedModel, cachedModels, deleteModel } from "./cached.js";
export { createEngine } from "./client.js";
export * from "./exports.js";
export type { EngineOptions } from "./options.js";
export { type SharedOptions, sharedEngine } from "./shared.js";
