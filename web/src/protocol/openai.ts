/** OpenAI's records, as far as a model on a device uses them. */

/** One message of a chat, in OpenAI's shape. */
export interface ChatMessage {
  readonly role: "system" | "developer" | "user" | "assistant" | "tool";
  readonly content: string;
  readonly name?: string;
  /** The calls that the assistant made. */
  readonly tool_calls?: readonly ToolCall[];
  /** The id of the call to which this message is the result. */
  readonly tool_call_id?: string;
  /** The assistant's reasoning before its answer. */
  readonly reasoning_content?: string;
}

/** A call of a function, as the model wrote it. */
export interface ToolCall {
  id: string;
  type: "function";
  /** `arguments` is JSON text. */
  function: { name: string; arguments: string };
}

/**
 * A part of a call, whose number in the answer is `index`: first id and name, then the arguments in pieces.
 */
export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function?: { name?: string; arguments?: string };
}

/** A function that the model may call. */
export interface FunctionTool {
  readonly type: "function";
  readonly function: {
    readonly name: string;
    readonly description?: string | null;
    /** A JSON schema that the arguments of every call match; any object by default. */
    readonly parameters?: object | null;
    readonly strict?: boolean | null;
  };
}

/**
 * "auto" allows text or calls, and is the default if there are tools; "required" requires calls; a function's
 * name requires calls of this function.
 */
export type ToolChoice =
  | "none"
  | "auto"
  | "required"
  | { readonly type: "function"; readonly function: { readonly name: string } };

/** A part of a message's content. */
export interface TextPart {
  readonly type: "text";
  readonly text: string;
}

/** A message as callers write it; parts of text are joined. */
export interface MessageParam extends Omit<ChatMessage, "content" | "tool_calls" | "reasoning_content"> {
  /** The content; only the assistant's messages may lack it, beside calls. */
  readonly content?: string | readonly TextPart[] | null;
  readonly tool_calls?: readonly ToolCall[] | null;
  readonly reasoning_content?: string | null;
}

/** A conversation that leaves too little room for its answer. */
export interface ContextOverflow {
  readonly messages: readonly ChatMessage[];
  /** The number of tokens in the prompt of the whole conversation. */
  readonly tokens: number;
  /** The most tokens of a prompt that leaves room for the answer. */
  readonly limit: number;
  /** The most tokens of prompt and answer together. */
  readonly contextLength: number;
  /** Counts the tokens in the prompt of a conversation. */
  readonly countTokens: (messages: readonly MessageParam[]) => Promise<number>;
}

/**
 * "error" rejects a prompt that does not fit. "truncate-oldest" leaves out the oldest turns until there is
 * room for the answer. A function returns the messages to answer instead.
 */
export type ContextPolicy =
  | "error"
  | "truncate-oldest"
  | ((overflow: ContextOverflow) => readonly MessageParam[] | Promise<readonly MessageParam[]>);

/** How the next token is chosen, as callers write it; null counts as absent. */
export interface SamplingOptions {
  max_tokens?: number | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  presence_penalty?: number | null;
  frequency_penalty?: number | null;
  /** Maps a token id to a number from −100 to 100 that is added to the token's logit. */
  logit_bias?: Readonly<Record<string, number>> | null;
  seed?: number | bigint | null;
  stop?: string | readonly string[] | null;
  ignore_eos?: boolean | null;
}

/** What an answer must match. */
export type ResponseFormat =
  | { readonly type: "text" }
  /** Any JSON object. */
  | { readonly type: "json_object" }
  /** JSON that is valid against a schema. `strict` has no effect here, because every answer matches. */
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
  /** The name of the loaded model; it may be absent. */
  model?: string;
  /** The user whom a service would bill; it has no effect here. */
  user?: string;
  /** The number of answers to give. */
  n?: number | null;
  /**
   * What the answer must match; any text by default. An answer that ends with finish_reason "length" is
   * incomplete.
   */
  response_format?: ResponseFormat | null;
  /** `include_usage` ends the stream with a chunk that holds the usage. */
  stream_options?: { include_usage?: boolean } | null;
  /** Aborts the answer, which rejects with the signal's reason. */
  signal?: AbortSignal;
}

/** At most 16 variables of the chat template, by name. */
export type TemplateVariables = Readonly<
  Record<string, string | number | boolean | readonly (string | number | boolean)[]>
>;

export interface ChatCompletionRequest extends RequestOptions {
  messages: readonly MessageParam[];
  /** The functions that the model may call. */
  tools?: readonly FunctionTool[] | null;
  tool_choice?: ToolChoice | null;
  /** Whether one answer may have several calls; true by default. */
  parallel_tool_calls?: boolean | null;
  /** OpenAI's newer name for max_tokens; it takes precedence. */
  max_completion_tokens?: number | null;
  logprobs?: boolean | null;
  /** The number of alternatives for each token, from 0 to 20. */
  top_logprobs?: number | null;
  /** Whether the answer continues the last message, which must be the assistant's. */
  continue_final_message?: boolean | null;
  /** Variables of the model's chat template, such as `{ enable_thinking: false }`. */
  chat_template_kwargs?: TemplateVariables | null;
  /**
   * What happens to a conversation that does not fit the context; by default the engine's `contextPolicy`.
   */
  context_policy?: ContextPolicy | null;
  stream?: boolean | null;
}

export interface CompletionRequest extends RequestOptions {
  /** A text, or its token ids. An empty prompt is the model's BOS token alone. */
  prompt: string | readonly number[];
  /** The number of alternatives beside each token's own log-probability, from 0 to 20. */
  logprobs?: number | null;
  /** Whether the text begins with the prompt. `max_tokens` may be 0 then, for the prompt alone. */
  echo?: boolean | null;
  /** Must equal `n`, because answers are not ranked. */
  best_of?: number | null;
  stream?: boolean | null;
}

/** Why a text ended: "stop" at an end token or a stop string, "length" at a limit. */
export type TextFinishReason = "stop" | "length";
/** "tool_calls": the answer ended by itself, with calls in it. */
export type FinishReason = TextFinishReason | "tool_calls";

/** The numbers of tokens in prompt and answer. */
export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: {
    cached_tokens: number;
    /** The number of messages that the context policy left out of the prompt; absent if it left out none. */
    left_out_messages?: number;
  };
}

/** A token with its log-probability, and the likeliest alternatives. */
export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[];
}

/** The tokens of a chat answer with their log-probabilities. */
export interface ChatLogprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

/** Log-probabilities of a completion, as lists of equal length. */
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

/** One of the answers to a chat request. */
export interface ChatChoice {
  index: number;
  message: {
    role: "assistant";
    /** Null if the answer has calls and no text. */
    content: string | null;
    reasoning_content?: string;
    tool_calls?: ToolCall[];
  };
  finish_reason: FinishReason;
  logprobs: ChatLogprobs | null;
}

/** The part of one answer in a chunk. */
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

/** One of the answers to a completion request. */
export interface CompletionChoice<Reason = TextFinishReason> {
  index: number;
  text: string;
  finish_reason: Reason;
  logprobs: CompletionLogprobs | null;
}

/** A whole chat answer. */
export interface ChatCompletion extends Reply<"chat.completion", ChatChoice> {
  usage: Usage;
}

/** A piece of a streamed chat answer. */
export interface ChatCompletionChunk extends Reply<"chat.completion.chunk", ChatChunkChoice> {
  usage?: Usage;
}

/** A whole completion. */
export interface Completion extends Reply<"text_completion", CompletionChoice> {
  usage: Usage;
}

/** A piece of a streamed completion. */
export interface CompletionChunk extends Reply<"text_completion", CompletionChoice<TextFinishReason | null>> {
  usage?: Usage;
}

/** A request for embeddings of a text, of token ids, or of several of either. */
export interface EmbeddingRequest {
  input: string | readonly string[] | readonly number[] | readonly (readonly number[])[];
  model?: string | null;
  /**
   * The number of values to return: the first ones, normalized again, for models that are trained for this.
   */
  dimensions?: number | null;
  /** "base64" returns the bytes of little-endian float32. */
  encoding_format?: "float" | "base64" | null;
  user?: string | null;
  signal?: AbortSignal | null;
}

/** The embedding of one input: values with L2 norm 1, or their bytes in base64. */
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

/** What a decision is about: a text, token ids, or the messages of a conversation. */
export type DecisionPrompt = string | readonly number[] | readonly MessageParam[];

/** Options of a decision. `values`: numbers to decide between, instead of labels. */
export interface DecisionOptions {
  readonly values?: readonly number[] | null;
  readonly neutral?: DecisionPrompt | null;
  readonly chat_template_kwargs?: TemplateVariables | null;
  readonly signal?: AbortSignal | null;
}

/** Options of `readPrompt`. */
export interface ReadPromptOptions {
  /** Token ids whose log-probabilities as the first token of the answer are wanted. */
  readonly tokens?: readonly number[];
  /** Whether `prompt_logprob` is wanted, which costs time: up to 16 rows of logits are read. */
  readonly perplexity?: boolean;
  /**
   * Whether the prompt stays in the cache until `signal` aborts, so that an answer to it which starts before
   * computes its last token alone. Another request that finds no room takes its pages.
   */
  readonly hold?: boolean;
  readonly chat_template_kwargs?: TemplateVariables | null;
  readonly signal?: AbortSignal | null;
}

/** What a model shows about a prompt when it has read it, before it answers. Logarithms are natural. */
export interface ReadPrompt {
  readonly prompt_tokens: number;
  /** Log-probabilities of the 20 likeliest first tokens of the answer, in descending order. */
  readonly top: readonly number[];
  /** Log-probabilities of the tokens that were asked for, as the first token of the answer, in their order. */
  readonly logprobs: readonly number[];
  /** The mean log-probability of some of the prompt's last tokens; null if they were in the cache, or not wanted. */
  readonly prompt_logprob: number | null;
}

/** A label: its probability among all labels, and the logarithm of the probability that an answer begins with it. */
export interface DecisionOption {
  readonly label: string;
  readonly value: number | null;
  readonly probability: number;
  readonly logprob: number;
  readonly token_logprobs: readonly number[];
}

/** The likeliest label, and all of them in the order of the request. */
export interface Decision {
  readonly choice: string;
  /** 0 where all labels are equally likely, 1 where one has everything. */
  readonly confidence: number;
  readonly options: readonly DecisionOption[];
  /** The mean of the values by their probabilities; null for labels. */
  readonly expected: number | null;
  readonly model: string;
  readonly prompt_tokens: number;
}
