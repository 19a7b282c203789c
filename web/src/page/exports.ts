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
  Choice as ResponseToolChoice,
  Common as ResponseItemBase,
  Item as ResponseItem,
  ItemParam,
  MessageItem as ResponseMessageItem,
  NamedFunction as ResponseToolName,
  OutputItem,
  Part as ResponsePart,
  ResponseEvent,
  ResponseFunction,
  ResponseRecord,
  ResponseRequest,
  Responses,
  Tool as ResponseTool,
  WholeResponse,
} from "../responses/types.js";
export type { Engine } from "./client.js";
export type { Completions } from "./completions.js";
