/** OpenAI's Responses API, as far as a model on a device follows it. */

import type { ChatCompletionRequest, SamplingOptions, TokenLogprob } from "../protocol/openai.js";

/** A part of an item's content. */
export interface ResponsePart {
  readonly type: string;
  readonly text?: string;
  readonly refusal?: string;
  readonly image_url?: unknown;
}

/** What every item may have. */
export interface ResponseItemBase {
  readonly id?: string;
  readonly status?: string;
}

/** A message of a conversation. */
export interface ResponseMessageItem extends ResponseItemBase {
  readonly type: "message";
  readonly role: "user" | "assistant" | "system" | "developer";
  readonly content: string | readonly ResponsePart[];
}

/** An item of a conversation. */
export type ResponseItem =
  | ResponseMessageItem
  | (ResponseItemBase & {
      readonly type: "function_call";
      readonly call_id: string;
      readonly name: string;
      readonly arguments: string;
      readonly namespace?: string;
    })
  | (ResponseItemBase & {
      readonly type: "function_call_output";
      readonly call_id: string;
      readonly output: string | readonly ResponsePart[];
    })
  | (ResponseItemBase & {
      readonly type: "reasoning";
      readonly summary?: readonly ResponsePart[];
      readonly content?: readonly ResponsePart[];
    })
  | { readonly type: "item_reference"; readonly id: string };

/** An item as callers write it: a message may lack its type. */
export type ItemParam = ResponseItem | (Omit<ResponseMessageItem, "type"> & { readonly type?: "message" });

/** A function that may be called. */
export interface ResponseFunction {
  readonly type: "function";
  readonly name: string;
  readonly description?: string | null;
  readonly parameters?: object | null;
  readonly strict?: boolean | null;
}

/** A function, or functions that belong together. */
export type ResponseTool =
  | ResponseFunction
  | {
      readonly type: "namespace";
      readonly name: string;
      readonly description?: string | null;
      readonly tools: readonly ResponseFunction[];
    };

/** Names a function that the model calls. */
export interface ResponseToolName {
  readonly type: "function";
  readonly name: string;
  readonly namespace?: string;
}

/** Which functions the model may call, or must call. */
export type ResponseToolChoice =
  | "none"
  | "auto"
  | "required"
  | ResponseToolName
  | {
      readonly type: "allowed_tools";
      readonly mode: "auto" | "required";
      readonly tools: readonly ResponseToolName[];
    };

/** A request. Null counts as absent. */
export interface ResponseRequest
  extends Omit<SamplingOptions, "max_tokens" | "logit_bias" | "ignore_eos">,
    Pick<ChatCompletionRequest, "chat_template_kwargs" | "context_policy" | "signal"> {
  readonly model?: string;
  /** A text, or the items of a conversation. */
  readonly input?: string | readonly ItemParam[] | null;
  readonly instructions?: string | null;
  /** The id of the response that this one continues: the newest 64 are kept in memory. */
  readonly previous_response_id?: string | null;
  /** Whether the response is kept for `previous_response_id`; true by default. */
  readonly store?: boolean | null;
  readonly stream?: boolean | null;
  readonly max_output_tokens?: number | null;
  readonly tools?: readonly ResponseTool[] | null;
  readonly tool_choice?: ResponseToolChoice | null;
  readonly parallel_tool_calls?: boolean | null;
  readonly text?: {
    readonly format?: {
      readonly type: "text" | "json_object" | "json_schema";
      readonly name?: string | null;
      readonly schema?: object | null;
      readonly description?: string | null;
      readonly strict?: boolean | null;
    } | null;
    readonly verbosity?: string | null;
  } | null;
  readonly reasoning?: { readonly effort?: string | null } | null;
  readonly top_logprobs?: number | null;
  readonly include?: readonly string[] | null;
  /** Fields that change nothing on a device. */
  readonly metadata?: Readonly<Record<string, string>> | null;
  readonly user?: string | null;
}

/** A checked request: nulls are gone, and every item has a type. */
export type Wanted = {
  readonly [Name in Exclude<keyof ResponseRequest, "input" | "text" | "reasoning">]?: NonNullable<
    ResponseRequest[Name]
  >;
} & {
  readonly input?: string | readonly ResponseItem[];
  readonly text?: {
    readonly format?: {
      readonly type: string;
      readonly name?: string;
      readonly schema?: object;
      readonly description?: string;
      readonly strict?: boolean;
    };
    readonly verbosity?: string;
  };
  readonly reasoning?: { readonly effort?: string };
};

/** An item of an answer. */
export type OutputItem = { readonly id: string; readonly status: string } & (
  | {
      readonly type: "reasoning";
      readonly summary: readonly never[];
      readonly content: readonly ResponsePart[];
    }
  | {
      readonly type: "message";
      readonly role: "assistant";
      readonly content: readonly {
        readonly type: "output_text";
        readonly text: string;
        readonly annotations: readonly never[];
        readonly logprobs: readonly TokenLogprob[];
      }[];
    }
  | {
      readonly type: "function_call";
      readonly call_id: string;
      readonly name: string;
      readonly namespace?: string;
      readonly arguments: string;
    }
);

/** A response; it also repeats the fields of its request. */
export interface ResponseRecord {
  readonly id: string;
  readonly object: "response";
  readonly created_at: number;
  readonly status: "in_progress" | "completed" | "incomplete" | "failed";
  readonly incomplete_details: { readonly reason: string } | null;
  readonly model: string;
  readonly output: readonly OutputItem[];
  readonly usage: {
    readonly input_tokens: number;
    readonly output_tokens: number;
    readonly total_tokens: number;
    readonly input_tokens_details: { readonly cached_tokens: number };
    readonly output_tokens_details: { readonly reasoning_tokens: number };
  } | null;
}

/** A whole response; `output_text` is the text of all its messages. */
export interface WholeResponse extends ResponseRecord {
  readonly output_text: string;
}

/** An event of a stream; its type says which other fields it has. */
export interface ResponseEvent {
  readonly type: string;
  readonly sequence_number: number;
  readonly response?: ResponseRecord;
  readonly item?: OutputItem;
  readonly item_id?: string;
  readonly output_index?: number;
  readonly delta?: string;
  readonly text?: string;
  readonly arguments?: string;
}

/** `engine.responses`. */
export interface Responses {
  create(request: ResponseRequest & { readonly stream: true }): Promise<AsyncIterable<ResponseEvent>>;
  create(request: ResponseRequest & { readonly stream?: false | null }): Promise<WholeResponse>;
  create(request: ResponseRequest): Promise<WholeResponse | AsyncIterable<ResponseEvent>>;
}
