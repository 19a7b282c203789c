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
   * Bits of a value in the KV cache: 16 for floats, 8 or 4 where the artifact has programs for that
   * (`nearfar build --kv-bits`); else floats.
   */
  readonly kvBits?: number | undefined;
  readonly contextLength?: number | undefined;
  /** Only the program of this name; else the one that suits the GPU. */
  readonly program?: string | undefined;
  /** WebGPU or WebAssembly; else WebGPU where there is a GPU. */
  readonly backend?: BackendName | undefined;
  /** Threads that compute in WebAssembly; else as many as there seem to be cores. */
  readonly threads?: number | undefined;
  /**
   * The manifest.json that is expected, as "sha256-…" (base64, as in HTML; several apart by blanks): another
   * is refused. The manifest vouches for all other files.
   */
  readonly integrity?: string | undefined;
}

/**
 * The backend that runs the model, and why. `pinned`: requested; `only`: the artifact has no other; `gpu`:
 * there is a GPU; `no-gpu`: there is none; `software`: there is only a software GPU; `failed`: the GPU could
 * not run it. `reason`: the same for people.
 */
export interface BackendChoice {
  readonly name: BackendName;
  readonly why: "pinned" | "only" | "gpu" | "no-gpu" | "software" | "failed";
  readonly reason: string;
}

/**
 * Why a GPU runs its program. `pinned`: requested by name; `only`: no other can run; `software`: on a
 * software GPU nothing is tried; `timed`: just tried, the quickest, or the one for the GPU's class where none
 * is clearly quicker; `kept`: tried at an earlier load; `slow`: trials would keep people waiting; `busy`:
 * another tab was trying programs; `offline`: the files of the others cannot be loaded now.
 */
export type ChoiceReason = "pinned" | "only" | "software" | "timed" | "kept" | "slow" | "busy" | "offline";

/** Which program of the artifact runs, and why that one. */
export interface ProgramChoice {
  /** The device class of this GPU; null where it is no GPU. */
  readonly deviceClass: DeviceClass | null;
  readonly why: ChoiceReason;
  /** What was measured at this load, by program. */
  readonly measured: Readonly<Record<string, StepTimes>>;
}

/** Milliseconds of a program's quickest steps: of one token, and of the largest size where that was tried. */
export interface StepTimes {
  readonly decode: number;
  readonly large: number | null;
}

/**
 * What a load is at. `fraction` is how much of the load is done, weights and kernels together: it never goes
 * back, is 1 at "ready" and no sooner, and is left out afterwards.
 */
export type LoadProgress = LoadStep & { readonly fraction?: number };

/** A step of a load. */
export type LoadStep =
  | { readonly phase: "manifest" }
  /** The backend that will run the model; sent again if it fails and the other one takes over. */
  | { readonly phase: "backend"; readonly backend: BackendChoice }
  /**
   * At the first load on a GPU: this program's steps are timed, in turn with those of the programs before.
   */
  | { readonly phase: "trying"; readonly program: string }
  /** The program that will run; another one follows where it fails. */
  | { readonly phase: "program"; readonly program: string; readonly choice: ProgramChoice }
  /**
   * Bytes of the weights: `loaded` are on this machine, `cached` of them from the browser's storage; `verified`
   * are what the manifest says; `uploaded` are on the device. The engine tells all of them, and all are `total`
   * before "ready".
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
   * Kernels of those that the load waits for; after "ready" of those that an answer waits for, the last time
   * with `compiled` equal to `total`.
   */
  | { readonly phase: "kernels"; readonly compiled: number; readonly total: number }
  | { readonly phase: "ready" }
  /**
   * After "ready": tokens read of the prompts that take more than a step, the cached ones among them; all of
   * them, before a token comes, when none is read any more.
   */
  | { readonly phase: "prompt"; readonly read: number; readonly total: number }
  /** After "ready": the GPU was lost, or had no memory for a step, and is reopened, with the weights. */
  | { readonly phase: "reopening" }
  /** The device was reopened, and answers continue; there may be less room for a context than before. */
  | { readonly phase: "reopened"; readonly contextLength: number };

/** The facts about a loaded model for the page. */
export interface ModelCard {
  readonly name: string;
  readonly architecture: string;
  readonly quantization: string;
  readonly backend: BackendChoice;
  /** The program of the artifact that this device runs. */
  readonly program: string;
  readonly choice: ProgramChoice;
  /** The precision of the kernels: "f16" or "f32". */
  readonly precision: string;
  readonly adapter: string;
  readonly contextLength: number;
  /** Rows of the largest step: fewer than the artifact has where there was no memory for them. */
  readonly largestStep: number;
  readonly vocabSize: number;
  readonly weightBytes: number;
  readonly license: string | null;
  /** Features in addition to writing text, as `device_features` of nearfar/routing names them. */
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
  /** Bytes of WebAssembly's memory, and threads that compute there; 0 where a GPU runs the model. */
  readonly wasmBytes: number;
  readonly threads: number;
  /** Kernels launched since the device was opened. */
  readonly launches: number;
  /** Kernels of one greedy decode step of one sequence. */
  readonly launchesPerToken: number;
  readonly cachePages: number;
  /** Tokens that a new request could put into the KV cache now. */
  readonly freeTokens: number;
  readonly contextLength: number;
  /** Rows of the largest step: fewer than the artifact has where there was no memory for them. */
  readonly largestStep: number;
  /** How often the GPU was reopened, after it was lost or had no memory for a step. */
  readonly reopened: number;
  /** The request that finished last. */
  readonly last: AnswerStats | null;
}

/** The cost of a request; times in milliseconds. */
export interface RequestStats {
  readonly promptTokens: number;
  /** Tokens of the prompt that were found in the prefix cache. */
  readonly cachedTokens: number;
  readonly completionTokens: number;
  /** From the call to the first token. */
  readonly ttft: number;
  /** From the first token to the last. */
  readonly decode: number;
}

/** How fast an answer was. */
export interface AnswerStats extends RequestStats {
  /** After the first token; 0 where there was only one. */
  readonly decodeTokensPerSecond: number;
}

/** Which step is timed, and how. */
export interface ProfileOptions {
  /** A size of the step; by default the smallest, which is decode. */
  readonly rows?: number;
  /** Positions in the cache, the rows' own included; by default 1024, or as many as there are. */
  readonly context?: number;
  /** How often; figures are medians. By default 10. */
  readonly rounds?: number;
}

/** One launch of a kernel. Browsers may give times in steps of 0.1 ms. */
export interface LaunchCost {
  readonly kernel: string;
  readonly milliseconds: number;
  /** The launch's share of the time of all launches. */
  readonly share: number;
  /** Bytes of the weights that it reads, where it reads them whole. */
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
  /** The answer is nothing but calls. */
  readonly required: boolean;
  /** It may have several. */
  readonly parallel: boolean;
}

export type Prompt =
  /** `continueLast`: the answer is the rest of the last message. `variables`: for the chat template. */
  | {
      readonly kind: "chat";
      readonly messages: readonly ChatMessage[];
      readonly continueLast: boolean;
      readonly calling?: Calling;
      readonly variables?: TemplateVariables;
    }
  /** The prompt as text or token ids. `echo`: the prompt comes before its answers, or instead of them. */
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
  /** Null: off; else how many alternatives to give. */
  readonly logprobs: number | null;
  /** What the answer must match; free text where it is left out. */
  readonly grammar?: Grammar;
}

export interface TokenScore {
  readonly token: string;
  readonly logprob: number;
  /** Characters (code points) of the whole text before the token. */
  readonly offset: number;
  readonly top: readonly { readonly token: string; readonly logprob: number }[];
}

/** A part of a call, which `index` numbers in its answer: first id and name, then its arguments in pieces. */
export type CallPart =
  | (ToolCall & { readonly index: number })
  | { readonly index: number; readonly function: { readonly arguments: string } };

/** A piece of an answer, by what it is. */
export interface Piece {
  readonly text: string;
  readonly reasoning?: string;
  /** At most one, because some clients do not combine two of one chunk. */
  readonly call?: CallPart;
}

export function hasMore({ text, reasoning, call }: Piece): boolean {
  return text !== "" || reasoning !== undefined || call !== undefined;
}

/** One step of an answer; `index` is the choice where several are asked for. */
export type AnswerEvent =
  /** The request is valid and on its way. */
  | { readonly event: "accepted" }
  | ({ readonly event: "delta"; readonly index: number; readonly score: TokenScore | null } & Piece)
  | ({ readonly event: "finish"; readonly index: number; readonly reason: FinishReason } & Piece)
  /** All of a request for embeddings, not normalized; `tokens`: of all inputs. */
  | { readonly event: "embedded"; readonly vectors: readonly Float32Array[]; readonly tokens: number }
  | { readonly event: "end"; readonly stats: RequestStats }
  | { readonly event: "error"; readonly error: ErrorRecord };

export type ToWorker =
  /** `load`: its name. */
  | {
      readonly type: "load";
      readonly url: string;
      readonly settings: LoadSettings;
      readonly load: string;
    }
  /** Whether the page of that load was left. */
  | { readonly type: "left"; readonly load: string; readonly left: boolean }
  | { readonly type: "generate"; readonly id: number; readonly request: GenerateRequest }
  | { readonly type: "embed"; readonly id: number; readonly inputs: EmbeddingInputs }
  | { readonly type: "abort"; readonly id: number }
  | { readonly type: "stats"; readonly id: number }
  | { readonly type: "count"; readonly id: number; readonly prompt: Prompt }
  | { readonly type: "profile"; readonly id: number; readonly options: ProfileOptions }
  | { readonly type: "dispose" }
  /**
   * The page has waited for a message as long as its patience allows. Relevant where others share the worker.
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
  /** Asks whether the page of another load was left. */
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
  /** Everything is freed; no stats where nothing was loaded. */
  | { readonly type: "disposed"; readonly stats: EngineStats | null };

/** The messages that get one answer, or several of which one is the last. */
export type Question = Extract<
  ToWorker,
  { readonly type: "generate" | "embed" | "count" | "profile" | "stats" }
>;
