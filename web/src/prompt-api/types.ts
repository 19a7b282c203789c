/** The Prompt API's own names, as far as they are supported here. */

export type Availability = "unavailable" | "downloadable" | "downloading" | "available";

/**
 * Receives an event target for the download's progress: `downloadprogress` events whose `loaded` goes from 0
 * to 1.
 */
export type MonitorCallback = (monitor: EventTarget) => void;

/** A kind of input or output, and its languages. */
export interface ExpectedContent {
  readonly type: string;
  readonly languages?: readonly string[];
}

/**
 * A function that the model may call. `execute` receives arguments that match the schema, and its result goes
 * to the model.
 */
export interface LanguageModelTool {
  readonly name: string;
  readonly description: string;
  readonly inputSchema: object;
  // biome-ignore lint/suspicious/noExplicitAny: as the standard has it; what comes follows the schema
  readonly execute: (input: any) => unknown;
}

/** The options that `availability` and `create` have in common. */
export interface CreateCoreOptions {
  readonly temperature?: number;
  readonly topK?: number;
  readonly expectedInputs?: readonly ExpectedContent[];
  readonly expectedOutputs?: readonly ExpectedContent[];
  readonly tools?: readonly LanguageModelTool[];
}

/** The options of a new session. */
export interface CreateOptions extends CreateCoreOptions {
  /** Aborts the loading, and later the session. */
  readonly signal?: AbortSignal;
  readonly monitor?: MonitorCallback;
  readonly initialPrompts?: readonly PromptMessage[];
}

/** A part of a message; only text is supported. */
export interface PromptContent {
  readonly type: string;
  readonly value: unknown;
}

/** A turn of a conversation. */
export interface PromptMessage {
  readonly role: "system" | "user" | "assistant";
  readonly content: string | readonly PromptContent[];
  /** Marks the assistant's last message, which the answer continues. */
  readonly prefix?: boolean;
}

/** A question, or turns of a conversation. */
export type PromptInput = string | readonly PromptMessage[];

/** Options of one question. */
export interface PromptOptions {
  /** A JSON schema, or a regular expression that the whole answer matches. */
  readonly responseConstraint?: object | RegExp;
  /** Has no effect, because a constraint is never written into the prompt. */
  readonly omitResponseConstraintInput?: boolean;
  readonly signal?: AbortSignal;
}

/** A conversation with the model; `LanguageModel` of the Prompt API. */
export interface LanguageModelSession extends EventTarget {
  prompt(input: PromptInput, options?: PromptOptions): Promise<string>;
  promptStreaming(input: PromptInput, options?: PromptOptions): ReadableStream<string>;
  append(input: PromptInput, options?: { readonly signal?: AbortSignal }): Promise<undefined>;
  measureContextUsage(input: PromptInput, options?: PromptOptions): Promise<number>;
  /** The number of tokens in the conversation so far. */
  readonly contextUsage: number;
  /** The most tokens of a conversation, the answer included. */
  readonly contextWindow: number;
  /** The older names of the three members above. */
  measureInputUsage(input: PromptInput, options?: PromptOptions): Promise<number>;
  readonly inputUsage: number;
  readonly inputQuota: number;
  readonly temperature: number | null;
  readonly topK: number | null;
  oncontextoverflow: ((event: Event) => void) | null;
  onquotaoverflow: ((event: Event) => void) | null;
  clone(options?: { readonly signal?: AbortSignal }): Promise<LanguageModelSession>;
  destroy(): undefined;
}

/** The static methods of the Prompt API's `LanguageModel`. */
export interface LanguageModelFactory {
  availability(options?: CreateCoreOptions): Promise<Availability>;
  create(options?: CreateOptions): Promise<LanguageModelSession>;
  params(): Promise<{
    readonly defaultTopK: number;
    readonly maxTopK: number;
    readonly defaultTemperature: number;
    readonly maxTemperature: number;
  }>;
  /** Frees the model, which the standard does not offer. A later `create` loads the model again. */
  unload(): Promise<void>;
}
