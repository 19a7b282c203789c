/** nearfar in the browser: `createEngine(url)` loads a WebGPU artifact and answers behind OpenAI's interface. */

export { createEngine, type Engine, type EngineOptions } from "./client.js";
export type { SamplingOptions } from "./engine/sampling.js";
export { ArtifactError, DeviceError, type ErrorCode, NearfarError, RequestError } from "./errors.js";
export type { AnswerStats, EngineStats, LoadProgress, ModelCard } from "./messages.js";
export type * from "./openai.js";
export type { ChatMessage } from "./text/types.js";
