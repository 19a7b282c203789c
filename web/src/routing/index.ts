/**
 * nearfar/routing: `HybridClient` answers on the device when it can and in the cloud when it must. It needs
 * no engine to load.
 */

export { CloudError, DeviceError, NearfarError, RequestError, RouteError } from "../protocol/errors.js";
export { Breaker, type Pass } from "./breaker.js";
export { limitFor, Threshold, type ThresholdRecord } from "./calibration.js";
export { HybridClient, type HybridCompletions } from "./client.js";
export type { CloudOptions } from "./cloud.js";
export { blocksOf, costOf, decide, predictCloud, predictDevice } from "./decide.js";
export type { DeviceEngine, DeviceTimeouts, DeviceTools } from "./device.js";
export type { DifficultyModel, LinearHead } from "./difficulty.js";
export type { Hints } from "./hints.js";
export type { Knowledge } from "./knowledge.js";
export { Ledger, type LedgerRecord } from "./ledger.js";
export { type Doubt, entropy, type First, Monitor, type WatchedToken } from "./monitor.js";
export type {
  Choice,
  Chunk,
  ChunkChoice,
  Completion,
  ContentPart,
  Delta,
  FinishReason,
  HybridRequest,
  Logprobs,
  Message,
  RequestRouting,
  RouteInfo,
  ToolCall,
  ToolCallDelta,
  Usage,
} from "./openai.js";
export type { HybridOptions, KeptState, Store } from "./options.js";
export {
  type BreakerOptions,
  type CalibrationOptions,
  DEFAULT_POLICY,
  type MonitorOptions,
  type Policy,
  type PolicyOptions,
  parsePolicy,
  type RetryOptions,
  type Timeouts,
} from "./policy.js";
export type { PrivateRecord } from "./privacy.js";
export { describeReason } from "./reasons.js";
export type { DecisionRecord, Outcome } from "./records.js";
export { backoff, RetryBudget } from "./retry.js";
export type { Probe, Regression, RouterModel, RouterPoint } from "./router-model.js";
export { type Difficulty, loadDifficulty, type Scorer } from "./scorer.js";
export { type SpeedRecord, Speeds } from "./speed.js";
export type * from "./types.js";
