/** What every entry that gives an engine exports beside its createEngine. */

export {
  ArtifactError,
  DeviceError,
  type ErrorCode,
  type ErrorDetails,
  NearfarError,
  RequestError,
} from "../both/errors.js";
export type {
  AnswerStats,
  BackendChoice,
  ChoiceReason,
  EngineStats,
  LaunchCost,
  LoadProgress,
  LoadStep,
  ModelCard,
  ProfileOptions,
  ProgramChoice,
  StepProfile,
  StepTimes,
} from "../both/messages.js";
export type * from "../both/openai.js";
export type { Engine } from "./client.js";
export type { Completions } from "./completions.js";
