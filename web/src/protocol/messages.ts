import type { BackendName, DeviceClass } from "./backends.js";
import type { ErrorRecord } from "./errors.js";
import type { Grammar } from "./grammar.js";
import type {
  ChatMessage,
  FinishReason,
  FunctionTool,
  SamplingOptions,
  TemplateVariables,
  ToolCall,
} from "./openai.js";

/** Messages between page and worker. Every message is one of these unions, so that a switch covers all. */

export interface LoadSettings {
  readonly kvMemory?: number | undefined;
  /**
   * Bits of a value in the KV cache: 16 for floats, 8 or 4 if the artifact has programs for that (`nearfar
   * build --kv-bits`). By default floats.
   */
  readonly kvBits?: number | undefined;
  readonly contextLength?: number | undefined;
  /** The name of the only program to use. By default, the program that suits the GPU. */
  readonly program?: string | undefined;
  /** WebGPU or WebAssembly. By default, WebGPU if there is a GPU. */
  readonly backend?: BackendName | undefined;
  /** The number of threads in WebAssembly. By default, as many as there seem to be cores. */
  readonly threads?: number | undefined;
  /**
   * The expected digests of manifest.json, as "sha256-…" (base64, as in HTML; several with blanks between
   * them): another manifest is rejected. The manifest vouches for all other files.
   */
  readonly integrity?: string | undefined;
}

/**
 * The backend that runs the model, and why. `pinned`: it was requested; `only`: the artifact has no other
 * backend; `gpu`: there is a GPU; `no-gpu`: there is no GPU; `software`: there is only a software GPU;
 * `failed`: the GPU could not run the model. `reason` says the same for people.
 */
export interface BackendChoice {
  readonly name: BackendName;
  readonly why: "pinned" | "only" | "gpu" | "no-gpu" | "software" | "failed";
  readonly reason: string;
}

/**
 * Why a GPU runs its program. `pinned`: it was requested by name; `only`: no other program can run;
 * `software`: on a software GPU no program is tried; `timed`: it was just tried, and is the quickest, or the
 * one for the GPU's class if no other is clearly quicker; `kept`: it was tried at an earlier load; `slow`:
 * trials would take too long; `busy`: another tab was trying programs; `offline`: the files of the other
 * programs cannot be loaded now.
 */
export type ChoiceReason = "pinned" | "only" | "software" | "timed" | "kept" | "slow" | "busy" | "offline";

/** The program that runs, and the reason for the choice. */
export interface ProgramChoice {
  /** The device class of this GPU; null without a GPU. */
  readonly deviceClass: DeviceClass | null;
  readonly why: ChoiceReason;
  /** The times measured at this load, by program. */
  readonly measured: Readonly<Record<string, StepTimes>>;
}

/** Milliseconds of a program's quickest steps: of one token, and of the largest size if that was tried. */
export interface StepTimes {
  readonly decode: number;
  readonly large: number | null;
}

/**
 * The phase of a load. `fraction` is the part of the load that is done, weights and kernels together: it
 * never goes back, is 1 at "ready" and not before, and is absent afterwards.
 */
export type LoadProgress = LoadStep & { readonly fraction?: number };

/** A phase of a load, with its progress. */
export type LoadStep =
  | { readonly phase: "manifest" }
  /** The backend that will run the model; sent again if that backend fails and the other one takes over. */
  | { readonly phase: "backend"; readonly backend: BackendChoice }
  /**
   * At the first load on a GPU: steps of this program are timed, in turn with those of the programs before.
   */
  | { readonly phase: "trying"; readonly program: string }
  /** The program that will run; another message follows if that program fails. */
  | { readonly phase: "program"; readonly program: string; readonly choice: ProgramChoice }
  /**
   * Bytes of the weights: `loaded` are on this machine, `cached` of them from the browser's storage;
   * `verified` match the manifest's digests; `uploaded` are on the device. The engine reports all four, and
   * all equal `total` before "ready".
   */
  | {
      readonly phase: "weights";
      readonly loaded: number;
      readonly cached: number;
      readonly verified?: number;
      readonly uploaded?: number;
      readonly total: number;
    }
  /**
   * The kernels for which the load waits; after "ready", the kernels for which an answer waits. The last
   * message has `compiled` equal to `total`.
   */
  | { readonly phase: "kernels"; readonly compiled: number; readonly total: number }
  | { readonly phase: "ready" }
  /**
   * After "ready": the tokens read of prompts that take more than a step, cached tokens included. The last
   * message, before the first token of an answer, has `read` equal to `total`.
   */
  | { readonly phase: "prompt"; readonly read: number; readonly total: number }
  /**
   * After "ready": the GPU was lost, or had no memory for a step, and is being reopened together with the
   * weights.
   */
  | { readonly phase: "reopening" }
  /** The device was reopened, and answers continue; there may be less room for a context than before. */
  | { readonly phase: "reopened"; readonly contextLength: number };

/** The facts about a loaded model for the page. */
export interface ModelCard {
  readonly name: string;
  readonly architecture: string;
  readonly quantization: string;
  /** The SHA-256 of the checkpoint that it was built from; null if the artifact does not say. */
  readonly checkpoint: string | null;
  readonly backend: BackendChoice;
  /** The program of the artifact that this device runs. */
  readonly program: string;
  readonly choice: ProgramChoice;
  /** The precision of the kernels: "f16" or "f32". */
  readonly precision: string;
  readonly adapter: string;
  readonly contextLength: number;
  /** The rows of the largest step: fewer than the artifact's if there was no memory for these. */
  readonly largestStep: number;
  readonly vocabSize: number;
  readonly weightBytes: number;
  readonly license: string | null;
  /** Features beyond writing text, with the names of `device_features` in nearfar/routing. */
  readonly features: readonly ("logprobs" | "json_object" | "json_schema" | "grammar" | "tools")[];
}

/** The state of an engine, its program, and its speed. */
export interface EngineStats {
  readonly backend: BackendChoice;
  /** The running program: equal requests give equal text only with the same program. */
  readonly program: string;
  readonly choice: ProgramChoice;
  readonly gpuBuffers: number;
  readonly gpuBytes: number;
  /** Bytes of WebAssembly's memory, and its number of threads; 0 if a GPU runs the model. */
  readonly wasmBytes: number;
  readonly threads: number;
  /** The number of kernels launched since the device was opened. */
  readonly launches: number;
  /** The number of kernels in one greedy decode step of one sequence. */
  readonly launchesPerToken: number;
  readonly cachePages: number;
  /** The number of tokens that a new request could put into the KV cache now. */
  readonly freeTokens: number;
  readonly contextLength: number;
  /** The rows of the largest step: fewer than the artifact's if there was no memory for these. */
  readonly largestStep: number;
  /** How often the GPU was reopened, after it was lost or had no memory for a step. */
  readonly reopened: number;
  /** The request that finished last. */
  readonly last: AnswerStats | null;
}

/** The cost of a request; times are in milliseconds. */
export interface RequestStats {
  readonly promptTokens: number;
  /** The number of prompt tokens that were found in the prefix cache. */
  readonly cachedTokens: number;
  readonly completionTokens: number;
  /** The time from the call to the first token. */
  readonly ttft: number;
  /** The time from the first token to the last. */
  readonly decode: number;
}

/** The cost and the speed of an answer. */
export interface AnswerStats extends RequestStats {
  /** The decode speed after the first token; 0 if there was only one token. */
  readonly decodeTokensPerSecond: number;
}

/** Which step is timed, and how. */
export interface ProfileOptions {
  /** A size of the step; by default the smallest, which is a decode step. */
  readonly rows?: number;
  /** The positions in the cache, the rows of the step included; by default 1024, or as many as there are. */
  readonly context?: number;
  /** How often the step is timed; figures are medians. The default is 10. */
  readonly rounds?: number;
}

/** One launch of a kernel. Browsers may give times in steps of 0.1 ms. */
export interface LaunchCost {
  readonly kernel: string;
  readonly milliseconds: number;
  /** The launch's share of the time of all launches. */
  readonly share: number;
  /** Bytes of the weights, for a launch that reads them as a whole. */
  readonly weightBytes: number;
}

/** The cost of a step's launches, in order, and the wall time of the step without timestamps. */
export interface StepProfile {
  readonly program: string;
  readonly rows: number;
  readonly context: number;
  readonly rounds: number;
  readonly stepMilliseconds: number;
  readonly launches: readonly LaunchCost[];
}

/** The functions that an answer may call, and how. */
export interface Calling {
  readonly tools: readonly FunctionTool[];
  /** The answer must be calls and nothing else. */
  readonly required: boolean;
  /** The answer may have several calls. */
  readonly parallel: boolean;
}

export type Prompt =
  /**
   * A request with messages. `continueLast` says that the answer continues the last message. `variables` are
   * for the chat template.
   */
  | {
      readonly kind: "chat";
      readonly messages: readonly ChatMessage[];
      readonly continueLast: boolean;
      readonly calling?: Calling;
      readonly variables?: TemplateVariables;
    }
  /**
   * A request with a prompt as text or token ids. `echo` says that the prompt is repeated before its answers,
   * or instead of them.
   */
  | {
      readonly kind: "text";
      readonly text: string | readonly number[];
      readonly echo?: "before" | "alone";
    };

/** The inputs of embeddings: texts, or token ids. */
export type EmbeddingInputs = readonly (string | readonly number[])[];

export interface GenerateRequest {
  readonly prompt: Prompt;
  readonly options: SamplingOptions;
  readonly n: number;
  /** How many alternatives to give for each token; null: no log-probabilities. */
  readonly logprobs: number | null;
  /** What the answer must match; any text by default. */
  readonly grammar?: Grammar;
  /** The answers themselves, one each, whose log-probabilities are wanted; `n` then has no meaning. */
  readonly labels?: readonly string[];
  readonly reading?: PromptReading;
}

/** Reads a prompt, and says what the model shows about it, instead of an answer. */
export interface PromptReading {
  /** Token ids whose log-probabilities as the first token of the answer are wanted. */
  readonly tokens: readonly number[];
  /** Whether the log-probabilities of some of the prompt's last tokens are wanted. */
  readonly perplexity: boolean;
}

export interface TokenScore {
  readonly token: string;
  readonly logprob: number;
  /** The number of code points in the text before the token. */
  readonly offset: number;
  readonly top: readonly { readonly token: string; readonly logprob: number }[];
}

/**
 * A part of a call, whose number in the answer is `index`: first id and name, then the arguments in pieces.
 */
export type CallPart =
  | (ToolCall & { readonly index: number })
  | { readonly index: number; readonly function: { readonly arguments: string } };

/** A piece of an answer: text, reasoning or a part of a call. */
export interface AnswerPart {
  readonly text: string;
  readonly reasoning?: string;
  /** At most one part of a call, because some clients do not join two parts in one chunk. */
  readonly call?: CallPart;
}

export function hasMore({ text, reasoning, call }: AnswerPart): boolean {
  return text !== "" || reasoning !== undefined || call !== undefined;
}

/** An event of an answer; `index` is the choice if several are requested. */
export type AnswerEvent =
  /** The request is valid, and its answer begins. */
  | { readonly event: "accepted" }
  | ({ readonly event: "delta"; readonly index: number; readonly score: TokenScore | null } & AnswerPart)
  | ({ readonly event: "finish"; readonly index: number; readonly reason: FinishReason } & AnswerPart)
  /**
   * The whole result of a request for embeddings, not normalized; `tokens` counts the tokens of all inputs.
   */
  | { readonly event: "embedded"; readonly vectors: readonly Float32Array[]; readonly tokens: number }
  /**
   * What the model shows about a prompt that it has read, in natural logarithms: the likeliest first tokens, in
   * descending order; the tokens that were asked for, in their order; the mean of tokens of the prompt, null if
   * they were in the cache or not wanted.
   */
  | {
      readonly event: "read";
      readonly top: readonly number[];
      readonly logprobs: readonly number[];
      readonly promptLogprob: number | null;
      readonly stats: RequestStats;
    }
  | { readonly event: "end"; readonly stats: RequestStats }
  | { readonly event: "error"; readonly error: ErrorRecord };

export type ToWorker =
  /** `load` is the name of this load. */
  | {
      readonly type: "load";
      readonly url: string;
      readonly settings: LoadSettings;
      readonly load: string;
    }
  /** Whether the user left the page of that load. */
  | { readonly type: "left"; readonly load: string; readonly left: boolean }
  | { readonly type: "generate"; readonly id: number; readonly request: GenerateRequest }
  | { readonly type: "embed"; readonly id: number; readonly inputs: EmbeddingInputs }
  | { readonly type: "abort"; readonly id: number }
  | { readonly type: "stats"; readonly id: number }
  | { readonly type: "count"; readonly id: number; readonly prompt: Prompt }
  | { readonly type: "profile"; readonly id: number; readonly options: ProfileOptions }
  | { readonly type: "dispose" }
  /**
   * The page has waited for a message as long as its patience allows. This matters if other pages share the
   * worker.
   */
  | { readonly type: "hangs" }
  /** Requests any message, to see whether the worker lives. */
  | { readonly type: "ping" };

export type FromWorker =
  /** The worker's first message: its script was found and runs. */
  | { readonly type: "started" }
  | { readonly type: "pong" }
  | { readonly type: "progress"; readonly progress: LoadProgress }
  | { readonly type: "warning"; readonly message: string }
  /** Asks whether the user left the page of another load. */
  | { readonly type: "whether left"; readonly load: string }
  | { readonly type: "loaded"; readonly card: ModelCard }
  | { readonly type: "failed"; readonly error: ErrorRecord }
  /** The card of the loaded model has changed: a reopened device may have less room. */
  | { readonly type: "card"; readonly card: ModelCard }
  /** The device was lost and could not be reopened. */
  | { readonly type: "lost"; readonly error: ErrorRecord }
  | { readonly type: "answer"; readonly id: number; readonly answer: AnswerEvent }
  | { readonly type: "stats"; readonly id: number; readonly stats: EngineStats | ErrorRecord }
  | { readonly type: "profiled"; readonly id: number; readonly profile: StepProfile | ErrorRecord }
  | { readonly type: "counted"; readonly id: number; readonly tokens: number | ErrorRecord }
  /** Everything is freed; `stats` is null if nothing was loaded. */
  | { readonly type: "disposed"; readonly stats: EngineStats | null };

/** The messages that get one answer, or several answers of which one is the last. */
export type Question = Extract<
  ToWorker,
  { readonly type: "generate" | "embed" | "count" | "profile" | "stats" }
>;
