/**
 * nearfar in the browser: `createEngine(url)` loads an artifact for WebGPU or WebAssembly and answers behind
 * OpenAI's interface.
 */

export { ArtifactError, DeviceError, type ErrorCode, NearfarError, RequestError } from "../both/errors.js";
export { type CachedModel, cachedModels, deleteModel } from "../both/file-cache.js";
export type {
  AnswerStats,
  BackendChoice,
  ChoiceReason,
  EngineStats,
  LaunchCost,
  LoadProgress,
  ModelCard,
  ProfileOptions,
  ProgramChoice,
  StepProfile,
  StepTimes,
} from "../both/messages.js";
export type * from "../both/openai.js";
export { createEngine, type Engine, type EngineOptions, type WorkerPort } from "./client.js";
