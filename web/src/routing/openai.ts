/** OpenAI's records that both sides share: the engine's own, and the ones that only a cloud supports. */

import type {
  ChatCompletionRequest,
  FinishReason as DeviceFinishReason,
  TokenLogprob as DeviceTokenLogprob,
  Usage as DeviceUsage,
  ToolCall,
  ToolCallDelta,
} from "../protocol/openai.js";
import type { Mode, Prediction, Reason, Side } from "./types.js";

/** A part of a message. */
export type ContentPart = { readonly type: string; readonly text?: string };

/** A message of a chat. The device takes text only; parts of other kinds go to the cloud. */
export interface Message {
  readonly role: string;
  readonly content?: string | readonly ContentPart[] | null;
  readonly name?: string;
  readonly tool_calls?: readonly unknown[];
  readonly tool_call_id?: string;
  readonly reasoning_content?: string | null;
  /** Marks a message as private, which makes the request private. The field is not sent. */
  readonly x_nearfar?: Pick<RequestRouting, "private">;
}

/** Routing settings of a single request. */
export interface RequestRouting {
  /** Overrides the policy's mode. */
  readonly mode?: Mode;
  /**
   * Keeps the request on the device, whatever fails; also later requests that carry its text or name its
   * conversation.
   */
  readonly private?: boolean;
  /** An id of the conversation, for budgets and warm caches. */
  readonly conversation?: string;
  /** The likely length of the answer, for the prediction of its time. */
  readonly expected_tokens?: number;
}

/** OpenAI's request, for one answer. */
export interface HybridRequest
  extends Omit<
    ChatCompletionRequest,
    "messages" | "stream" | "n" | "response_format" | "tools" | "tool_choice"
  > {
  messages: readonly Message[];
  stream?: boolean | null;
  model?: string;
  tools?: readonly unknown[] | null;
  tool_choice?: unknown;
  response_format?: { readonly type: string; readonly [field: string]: unknown } | null;
  reasoning_effort?: string | null;
  /** Fields for this cloud, which become fields of the request. */
  extra_body?: Readonly<Record<string, unknown>>;
  x_nearfar?: RequestRouting;
}

/** Where an answer came from, and why. */
export interface RouteInfo {
  readonly decision_id: string;
  /** The side that answers; for an answer that was taken over, the one that ended it. */
  readonly route: Side;
  /** All sides that gave a part of it, in order. */
  readonly path: readonly Side[];
  readonly reasons: readonly Reason[];
  /** Whether the device answers though the cloud was wanted. */
  readonly degraded: boolean;
  readonly predicted: { readonly device: Prediction | null; readonly cloud: Prediction | null };
  /**
   * The cloud's cost, and what it would have cost beyond that, in the policy's unit; complete with the last
   * chunk.
   */
  readonly spent: number;
  readonly saved: number;
  /** In shadow mode: where the request would have gone. */
  readonly would_route: Side | null;
}

/** Why an answer ended. */
export type FinishReason = DeviceFinishReason | "content_filter";
export type TokenLogprob = DeviceTokenLogprob;
export type { ToolCall, ToolCallDelta };

/** The part of a message in a chunk. */
export interface Delta {
  role?: "assistant";
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: ToolCallDelta[];
}

/** The answer's tokens with their log-probabilities. */
export interface Logprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

/** What a {@link Chunk} adds. */
export interface ChunkChoice {
  index: number;
  delta: Delta;
  finish_reason: FinishReason | null;
  logprobs?: Logprobs | null;
}

/** Tokens of prompt and answer. */
export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: Partial<DeviceUsage["prompt_tokens_details"]> | null;
}

/** A piece of a streamed answer. */
export interface Chunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: ChunkChoice[];
  usage?: Usage | null;
  /** On the first chunk and on the last ones. */
  x_nearfar?: RouteInfo;
}

/** The answer of a {@link Completion}; there is one. */
export interface Choice {
  index: number;
  message: { role: "assistant"; content: string; reasoning_content?: string; tool_calls?: ToolCall[] };
  finish_reason: FinishReason;
  logprobs: Logprobs | null;
}

/** A whole answer, with where it came from. */
export interface Completion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: Choice[];
  usage: Usage;
  x_nearfar: RouteInfo;
}

/** The text of a message; parts of other kinds are left out. */
export function textOf({ content }: Message): string {
  if (typeof content === "string") return content;
  return (content ?? []).map(({ text }) => text ?? "").join("");
}

/**
 * The request for the rest of an answer: the text so far becomes the beginning of the assistant's message,
 * and what was written already counts against the limit.
 */
export function continued(request: HybridRequest, text: string, seen: number): HybridRequest {
  if (text === "") return request;
  const messages = [...request.messages, { role: "assistant", content: text }];
  const max_tokens = Math.max((limitOf(request) ?? Number.POSITIVE_INFINITY) - seen, 1);
  return { ...request, max_tokens, messages, continue_final_message: true };
}

/** The most tokens that the answer may have; null where the request does not say. */
export function limitOf(request: HybridRequest): number | null {
  return request.max_completion_tokens ?? request.max_tokens ?? null;
}
