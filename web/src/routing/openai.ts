/** OpenAI's shapes as both sides share them: the engine's own, and what only a cloud can do. */

import { RequestError } from "../errors.js";
import type {
  ChatCompletionRequest,
  FinishReason as DeviceFinishReason,
  TokenLogprob as DeviceTokenLogprob,
  Usage as DeviceUsage,
} from "../openai.js";
import { type Feature, MODES, type Mode, type Prediction, type Reason, type Side } from "./types.js";

export type ContentPart = { readonly type: string; readonly text?: string };

/** A message of a chat. The device takes text only; parts of other kinds go to the cloud. */
export interface Message {
  readonly role: string;
  readonly content?: string | readonly ContentPart[] | null;
  readonly name?: string;
  readonly tool_calls?: readonly unknown[];
  readonly tool_call_id?: string;
}

/** What a single request decides for itself. */
export interface RequestRouting {
  /** Instead of the policy's mode. */
  readonly mode?: Mode;
  /** Never leaves the device, whatever fails. */
  readonly private?: boolean;
  /** Names the conversation, for budgets and warm caches. */
  readonly conversation?: string;
  /** The likely length of the answer, for the prediction of its time. */
  readonly expected_tokens?: number;
}

/** OpenAI's request, for one answer. */
export interface HybridRequest extends Omit<ChatCompletionRequest, "messages" | "stream" | "n"> {
  messages: readonly Message[];
  stream?: boolean | null;
  model?: string;
  tools?: readonly unknown[] | null;
  tool_choice?: unknown;
  response_format?: { readonly type: string; readonly [field: string]: unknown } | null;
  reasoning_effort?: string | null;
  /** What only this cloud knows: its fields become fields of the request. */
  extra_body?: Readonly<Record<string, unknown>>;
  x_nearfar?: RequestRouting;
}

/** Where an answer came from, and why. */
export interface RouteInfo {
  readonly decision_id: string;
  /** The side that answers; of an answer that was taken over, the one that ended it. */
  readonly route: Side;
  /** All sides that gave a part of it, in order. */
  readonly path: readonly Side[];
  readonly reasons: readonly Reason[];
  /** The device answers, though the cloud was wanted. */
  readonly degraded: boolean;
  readonly predicted: { readonly device: Prediction | null; readonly cloud: Prediction | null };
  /** What the cloud has cost, and what it would have cost beyond that, in the policy's unit; whole with the last chunk. */
  readonly spent: number;
  readonly saved: number;
  /** In shadow mode: where the request would have gone. */
  readonly would_route: Side | null;
}

export type FinishReason = DeviceFinishReason | "tool_calls" | "content_filter";
export type TokenLogprob = DeviceTokenLogprob;

export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function?: { name?: string; arguments?: string };
}

export interface Delta {
  role?: "assistant";
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: ToolCallDelta[];
}

export interface Logprobs {
  content: (TokenLogprob & { top_logprobs: TokenLogprob[] })[];
}

export interface ChunkChoice {
  index: number;
  delta: Delta;
  finish_reason: FinishReason | null;
  logprobs?: Logprobs | null;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: Partial<DeviceUsage["prompt_tokens_details"]> | null;
}

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

export interface ToolCall {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

export interface Choice {
  index: number;
  message: { role: "assistant"; content: string; reasoning_content?: string; tool_calls?: ToolCall[] };
  finish_reason: FinishReason;
  logprobs: Logprobs | null;
}

export interface Completion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: Choice[];
  usage: Usage;
  x_nearfar: RouteInfo;
}

const HINTS = ["mode", "private", "conversation", "expected_tokens"];

/** Refuses what the client does not do, and what it does not know: a misspelt `private` must not pass. */
export function checked(request: HybridRequest): HybridRequest {
  const own = request.x_nearfar ?? {};
  const unknown = Object.keys(own).filter((name) => !HINTS.includes(name));
  const wrong = (message: string, param = "x_nearfar"): never => {
    throw new RequestError(message, param);
  };
  if (unknown.length > 0) wrong(`x_nearfar has no field ${unknown.join(", ")}`);
  if (own.mode !== undefined && !MODES.includes(own.mode))
    wrong(`x_nearfar.mode must be one of ${MODES.join(", ")}, not ${JSON.stringify(own.mode)}`);
  if (own.private !== undefined && typeof own.private !== "boolean")
    wrong(`x_nearfar.private must be true or false, not ${JSON.stringify(own.private)}`);
  if (!Array.isArray(request.messages) || request.messages.length === 0)
    wrong("messages must be a list of at least one { role, content }", "messages");
  if (((request as { n?: number | null }).n ?? 1) !== 1)
    wrong("n: the hybrid client gives one answer a request; ask several times", "n");
  if (request.continue_final_message)
    wrong("continue_final_message is the hybrid client's own means; ask a side directly", "continue_final_message");
  return request;
}

/** What a request needs of a side. */
export function featuresOf(request: HybridRequest): Feature[] {
  const features: Feature[] = [];
  if (request.tools?.length && request.tool_choice !== "none") features.push("tools");
  const format = request.response_format?.type;
  if (format === "json_schema" || format === "json_object") features.push(format);
  else if (format === "grammar" || format === "regex") features.push("grammar");
  if (request.messages.some(({ content }) => Array.isArray(content) && content.some(({ type }) => type !== "text")))
    features.push("images");
  if (request.logprobs) features.push("logprobs");
  if (request.reasoning_effort) features.push("reasoning");
  return features;
}

/** The text of a message; parts of other kinds are left out. */
export function textOf({ content }: Message): string {
  if (typeof content === "string") return content;
  return (content ?? []).map(({ text }) => text ?? "").join("");
}

/** What a model that nobody asked yet makes of messages, in tokens: four letters each, and each message's frame. */
export function estimateTokens(messages: readonly Message[]): number {
  return messages.reduce((sum, message) => sum + Math.ceil(textOf(message).length / 4) + 4, 0);
}

export function limitOf(request: HybridRequest): number | null {
  return request.max_completion_tokens ?? request.max_tokens ?? null;
}

/**
 * The request for the rest of an answer: the text so far becomes the beginning of the assistant's message, and what was
 * written already counts against the limit.
 */
export function continued(request: HybridRequest, text: string, seen: number): HybridRequest {
  if (text === "") return request;
  const messages = [...request.messages, { role: "assistant", content: text }];
  const max_tokens = Math.max((limitOf(request) ?? Number.POSITIVE_INFINITY) - seen, 1);
  return { ...request, max_tokens, messages, continue_final_message: true };
}
