/** OpenAI's shapes, as far as they concern a model on a device. */

/** One message of a chat, in OpenAI's shape. */
export interface ChatMessage {
  readonly role: "system" | "developer" | "user" | "assistant" | "tool";
  readonly content: string;
  readonly name?: string;
  /** What the assistant asked to be called. */
  readonly tool_calls?: readonly ToolCall[];
  /** The id of the call whose result this is. */
  readonly tool_call_id?: string;
  /** What the assistant thought before it answered. */
  readonly reasoning_content?: string;
}

/** A call of a function, as the model wrote it. */
export interface ToolCall {
  id: string;
  type: "function";
  /** `arguments`: JSON text. */
  function: { name: string; arguments: string };
}

/** A part of a call, which `index` numbers: first its id and name, then its arguments piece by piece. */
export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function?: { name?: string; arguments?: string };
}

/** A function that the model may ask to be called. */
export interface FunctionTool {
  readonly type: "function";
  readonly function: {
    readonly name: string;
    readonly description?: string | null;
    /** A JSON schema, which the arguments of every call match; any object without it. */
    readonly parameters?: object | null;
    readonly strict?: boolean | null;
  };
}

/** "auto": text or calls, by default where there are tools; "required": calls; or calls of one function. */
export type ToolChoice =
  | "none"
  | "auto"
  | "required"
  | { readonly type: "function"; readonly function: { readonly name: string } };

/** A piece of a message's content. */
export interface TextPart {
  readonly type: "text";
  readonly text: string;
}

/** A message as callers write it: parts of text are joined. */
export interface MessageParam extends Omit<ChatMessage, "content" | "tool_calls" | "reasoning_content"> {
  /** May be missing of the assistant only, as beside its calls. */
  readonly content?: string | readonly TextPart[] | null;
  readonly tool_calls?: readonly ToolCall[] | null;
  readonly reasoning_content?: string | null;
}

/** A conversation that leaves too little room for its answer. */
export interface ContextOverflow {
  readonly messages: readonly ChatMessage[];
  /** Tokens of the whole conversation as the model's prompt. */
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

/** What an answer must be. */
export type ResponseFormat =
  | { readonly type: "text" }
  /** Any JSON object. */
  | { readonly type: "json_object" }
  /** JSON that is valid by a schema; `strict` means nothing here, where all answers match. */
  | {
      readonly type: "json_schema";
      readonly json_schema: {
        readonly name: string;
        readonly description?: string | null;
        readonly schema?: object | null;
        readonly strict?: boolean | null;
      };
    }
  /** A text that a regular expression matches from end to end. */
  | { readonly type: "regex"; readonly regex: string }
  /** A text of an EBNF grammar, whose first rule is `root`. */
  | { readonly type: "grammar"; readonly grammar: string };

export interface RequestOptions extends SamplingOptions {
  /** The loaded model's name, or nothing. */
  model?: string;
  /** Whom a service would bill; without a meaning here. */
  user?: string;
  /** How many answers to give. */
  n?: number | null;
  /** What the answer must be; free text where it is left out. An answer that ends for its length is cut off. */
  response_format?: ResponseFormat | null;
  /** End the stream with a chunk that holds the usage. */
  stream_options?: { include_usage?: boolean } | null;
  /** Ends the answer, which rejects with its reason. */
  signal?: AbortSignal;
}

/** By name, at most 16. */
export type TemplateVariables = Readonly<
  Record<string, string | number | boolean | readonly (string | number | boolean)[]>
>;

export interface ChatCompletionRequest extends RequestOptions {
  messages: readonly MessageParam[];
  /** Functions that the model may ask to be called. */
  tools?: readonly FunctionTool[] | null;
  tool_choice?: ToolChoice | null;
  /** Whether one answer may have several calls; true by default. */
  parallel_tool_calls?: boolean | null;
  /** OpenAI's newer name for max_tokens; wins over it. */
  max_completion_tokens?: number | null;
  logprobs?: boolean | null;
  /** 0 to 20. */
  top_logprobs?: number | null;
  /** The answer is the rest of the last message, which must be the assistant's. */
  continue_final_message?: boolean | null;
  /** Variables for the model's chat template, such as `{ enable_thinking: false }`. */
  chat_template_kwargs?: TemplateVariables | null;
  /** What becomes of a conversation that does not fit the context; else as `contextPolicy` of the engine. */
  context_policy?: ContextPolicy | null;
  stream?: boolean | null;
}

export interface CompletionRequest extends RequestOptions {
  /** A text, or its token ids. An empty prompt is just the model's BOS token. */
  prompt: string | readonly number[];
  /** How many alternatives to give beside each token's own logprob, 0 to 20. */
  logprobs?: number | null;
  /** The text begins with the prompt. `max_tokens` may be 0 then: nothing but the prompt. */
  echo?: boolean | null;
  /** As many as `n`, for answers are not ranked. */
  best_of?: number | null;
  stream?: boolean | null;
}

/** How a text ends: by itself or by a stop string, or for its length. */
export type TextFinishReason = "stop" | "length";
/** "tool_calls": by itself, with calls in it. */
export type FinishReason = TextFinishReason | "tool_calls";

/** Tokens of prompt and answer. */
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

/** A token, how likely it was, and others in its place. */
export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[];
}

/** The tokens of a chat's answer, and how likely they were. */
export interface ChatLogprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

/** Log-probabilities of a continued text: lists of equal length. */
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

/** One answer. */
export interface ChatChoice {
  index: number;
  message: {
    role: "assistant";
    /** Null where there are calls and no text. */
    content: string | null;
    reasoning_content?: string;
    tool_calls?: ToolCall[];
  };
  finish_reason: FinishReason;
  logprobs: ChatLogprobs | null;
}

/** What a chunk adds to one answer. */
export interface ChatChunkChoice {
  index: number;
  delta: {
    role?: "assistant";
    content?: string;
    reasoning_content?: string;
    tool_calls?: ToolCallDelta[];
  };
  finish_reason: FinishReason | null;
  logprobs: ChatLogprobs | null;
}

/** One continuation. */
export interface CompletionChoice<Reason = TextFinishReason> {
  index: number;
  text: string;
  finish_reason: Reason;
  logprobs: CompletionLogprobs | null;
}

/** A whole answer of a chat. */
export interface ChatCompletion extends Reply<"chat.completion", ChatChoice> {
  usage: Usage;
}

/** A piece of a streamed answer. */
export interface ChatCompletionChunk extends Reply<"chat.completion.chunk", ChatChunkChoice> {
  usage?: Usage;
}

/** A text that was continued. */
export interface Completion extends Reply<"text_completion", CompletionChoice> {
  usage: Usage;
}

/** A piece of a streamed continuation. */
export interface CompletionChunk extends Reply<"text_completion", CompletionChoice<TextFinishReason | null>> {
  usage?: Usage;
}

/** What embeddings are asked of: a text, token ids, or several of either. */
export interface EmbeddingRequest {
  input: string | readonly string[] | readonly number[] | readonly (readonly number[])[];
  model?: string | null;
  /** How many values of a vector are wanted: the first ones, normalized again, for models trained so. */
  dimensions?: number | null;
  /** "base64": the bytes of little-endian float32. */
  encoding_format?: "float" | "base64" | null;
  user?: string | null;
  signal?: AbortSignal | null;
}

/** The embedding of one input: values of length 1 by L2, or those in base64. */
export interface Embedding {
  object: "embedding";
  index: number;
  embedding: number[] | string;
}

/** Embeddings, in the order of the inputs. */
export interface EmbeddingResponse {
  object: "list";
  data: Embedding[];
  model: string;
  usage: { prompt_tokens: number; total_tokens: number };
}
