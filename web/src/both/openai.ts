/** OpenAI's shapes, as far as they concern a model on a device. */

/** One message of a chat, in OpenAI's shape. */
export interface ChatMessage {
  readonly role: "system" | "user" | "assistant" | "tool";
  readonly content: string;
  readonly name?: string;
}

/** A piece of a message's content. */
export interface TextPart {
  readonly type: "text";
  readonly text: string;
}

/** A message as callers write it: parts of text are joined. */
export interface MessageParam extends Omit<ChatMessage, "content"> {
  readonly content: string | readonly TextPart[];
}

/** A conversation that leaves too little room for its answer. */
export interface ContextOverflow {
  readonly messages: readonly ChatMessage[];
  /** Of the whole conversation as the model's prompt. */
  readonly tokens: number;
  /** Tokens that the prompt may have, so that the answer has room. */
  readonly limit: number;
  /** Tokens that prompt and answer may have together. */
  readonly contextLength: number;
  /** Tokens of a conversation as the model's prompt. */
  readonly countTokens: (messages: readonly MessageParam[]) => Promise<number>;
}

/**
 * "error": a prompt that does not fit is refused. "truncate-oldest": the oldest turns are left out until there
 * is room for the answer. A function gives the messages to answer instead.
 */
export type ContextPolicy =
  | "error"
  | "truncate-oldest"
  | ((overflow: ContextOverflow) => readonly MessageParam[] | Promise<readonly MessageParam[]>);

/** How the next token is chosen, as callers write it; null counts as left out. */
export interface SamplingOptions {
  max_tokens?: number | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  /** Token id to a number from −100 to 100 that is added to its logit. */
  logit_bias?: Readonly<Record<string, number>> | null;
  seed?: number | bigint | null;
  stop?: string | readonly string[] | null;
  ignore_eos?: boolean | null;
}

export interface RequestOptions extends SamplingOptions {
  /** The loaded model's name, or nothing. */
  model?: string;
  /** Whom a service would bill; without a meaning here. */
  user?: string;
  /** How many answers to give. */
  n?: number | null;
  /** End the stream with a chunk that holds the usage. */
  stream_options?: { include_usage?: boolean } | null;
  /** Ends the answer, which rejects with its reason. */
  signal?: AbortSignal;
}

export interface ChatCompletionRequest extends RequestOptions {
  messages: readonly MessageParam[];
  /** OpenAI's newer name for max_tokens; wins over it. */
  max_completion_tokens?: number | null;
  logprobs?: boolean | null;
  /** 0 to 20. */
  top_logprobs?: number | null;
  /** The answer is the rest of the last message, which must be the assistant's. */
  continue_final_message?: boolean | null;
  /** What becomes of a conversation that does not fit the context; else as `contextPolicy` of the engine. */
  context_policy?: ContextPolicy | null;
  stream?: boolean | null;
}

export interface CompletionRequest extends RequestOptions {
  /** An empty prompt is just the model's BOS token. */
  prompt: string;
  /** How many alternatives to give beside each token's own logprob, 0 to 20. */
  logprobs?: number | null;
  stream?: boolean | null;
}

export type FinishReason = "stop" | "length";

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: {
    cached_tokens: number;
    /** Messages that the context policy left out of the prompt; missing where it left out none. */
    left_out_messages?: number;
  };
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[];
}

export interface ChatLogprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

export interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: number[];
  top_logprobs: Record<string, number>[];
  text_offset: number[];
}

interface Reply<Kind extends string, Choice> {
  id: string;
  object: Kind;
  /** Unix time in seconds. */
  created: number;
  model: string;
  choices: Choice[];
}

export interface ChatChoice {
  index: number;
  message: { role: "assistant"; content: string };
  finish_reason: FinishReason;
  logprobs: ChatLogprobs | null;
}

export interface ChatChunkChoice {
  index: number;
  delta: { role?: "assistant"; content?: string };
  finish_reason: FinishReason | null;
  logprobs: ChatLogprobs | null;
}

export interface CompletionChoice<Reason = FinishReason> {
  index: number;
  text: string;
  finish_reason: Reason;
  logprobs: CompletionLogprobs | null;
}

export interface ChatCompletion extends Reply<"chat.completion", ChatChoice> {
  usage: Usage;
}

export interface ChatCompletionChunk extends Reply<"chat.completion.chunk", ChatChunkChoice> {
  usage?: Usage;
}

export interface Completion extends Reply<"text_completion", CompletionChoice> {
  usage: Usage;
}

export interface CompletionChunk extends Reply<"text_completion", CompletionChoice<FinishReason | null>> {
  usage?: Usage;
}
