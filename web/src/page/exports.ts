/** What every entry that gives an engine exports beside its createEngine. */

export {
  ArtifactError,
  DeviceError,
  type ErrorCode,
  type ErrorDetails,
  NearfarError,
  RequestError,
} from "../protocol/errors.js";
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
} from "../protocol/messages.js";
export type * from "../protocol/openai.js";
export type {
  ItemParam,
  OutputItem,
  ResponseEvent,
  ResponseFunction,
  ResponseItem,
  ResponseItemBase,
  ResponseMessageItem,
  ResponsePart,
  ResponseRecord,
  ResponseRequest,
  Responses,
  ResponseTool,
  ResponseToolChoice,
  ResponseToolName,
  WholeResponse,
} from "../responses/types.js";
export type { Engine } from "./client.js";
export type { Completions } from "./completions.js";
