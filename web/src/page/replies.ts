import type { AnswerPart, RequestStats, TokenScore } from "../protocol/messages.js";
import type * as openai from "../protocol/openai.js";

/** Converts the worker's messages to OpenAI's shapes. */

/** The fields that all replies to one request share. */
export interface ReplyHead {
  readonly id: string;
  readonly created: number;
  readonly model: string;
}

/** The difference between chat completions and plain completions. */
export interface ReplyShape<Chunk, Whole> {
  /** The first chunk of each choice, where there is one. */
  opening(head: ReplyHead, index: number): Chunk | null;
  delta(head: ReplyHead, index: number, piece: AnswerPart, score: TokenScore | null): Chunk;
  finish(head: ReplyHead, index: number, reason: openai.FinishReason): Chunk;
  usage(head: ReplyHead, usage: openai.Usage): Chunk;
  whole(head: ReplyHead, choices: readonly WholeChoice[], usage: openai.Usage): Whole;
}

/** A choice once it is complete. */
export interface WholeChoice {
  text: string;
  reasoning: string;
  calls: openai.ToolCall[];
  scores: TokenScore[];
  reason: openai.FinishReason;
}

/** `leftOut`: messages that the context policy left out. */
export function usageOf(
  { promptTokens, cachedTokens, completionTokens }: RequestStats,
  leftOut: number,
): openai.Usage {
  return {
    prompt_tokens: promptTokens,
    completion_tokens: completionTokens,
    total_tokens: promptTokens + completionTokens,
    prompt_tokens_details: {
      cached_tokens: cachedTokens,
      ...(leftOut > 0 && { left_out_messages: leftOut }),
    },
  };
}

export const CHAT: ReplyShape<openai.ChatCompletionChunk, openai.ChatCompletion> = {
  opening: (head, index) => chatChunk(head, { index, delta: { role: "assistant", content: "" } }),
  delta: (head, index, { text, reasoning, call }, score) => {
    const delta = {
      ...(reasoning && { reasoning_content: reasoning }),
      ...((text !== "" || !(reasoning || call)) && { content: text }),
      ...(call && { tool_calls: [call] }),
    };
    return chatChunk(head, { index, delta, logprobs: score && chatLogprobs([score]) });
  },
  finish: (head, index, reason) => chatChunk(head, { index, delta: {}, finish_reason: reason }),
  usage: (head, usage) => ({ ...head, object: "chat.completion.chunk", choices: [], usage }),
  whole: (head, choices, usage) => ({
    ...head,
    object: "chat.completion",
    choices: choices.map(({ text, reasoning, calls, scores, reason }, index) => ({
      index,
      message: {
        role: "assistant",
        content: text === "" && calls.length > 0 ? null : text,
        ...(reasoning !== "" && { reasoning_content: reasoning }),
        ...(calls.length > 0 && { tool_calls: calls }),
      },
      finish_reason: reason,
      logprobs: scores.length > 0 ? chatLogprobs(scores) : null,
    })),
    usage,
  }),
};

type ChunkChoice = Pick<openai.ChatChunkChoice, "index" | "delta"> & Partial<openai.ChatChunkChoice>;

function chatChunk(head: ReplyHead, choice: ChunkChoice): openai.ChatCompletionChunk {
  return {
    ...head,
    object: "chat.completion.chunk",
    choices: [{ finish_reason: null, logprobs: null, ...choice }],
  };
}

function textLogprobs(scores: readonly TokenScore[]): openai.CompletionLogprobs | null {
  if (scores.length === 0) return null;
  return {
    tokens: scores.map(({ token }) => token),
    token_logprobs: scores.map(({ logprob }) => logprob),
    top_logprobs: scores.map(({ top }) =>
      Object.fromEntries(top.map(({ token, logprob }) => [token, logprob])),
    ),
    text_offset: scores.map(({ offset }) => offset),
  };
}

const object = "text_completion";

/** Chunks and whole answers of completions have the same shape. */
export const TEXT: ReplyShape<openai.CompletionChunk, openai.Completion> = {
  opening: () => null,
  delta: (head, index, { text }, score) => ({
    ...head,
    object,
    choices: [{ index, text, finish_reason: null, logprobs: textLogprobs(score ? [score] : []) }],
  }),
  finish: (head, index, reason) => ({
    ...head,
    object,
    choices: [{ index, text: "", finish_reason: textReason(reason), logprobs: null }],
  }),
  usage: (head, usage) => ({ ...head, object, choices: [], usage }),
  whole: (head, choices, usage) => ({
    ...head,
    object,
    choices: choices.map(({ text, scores, reason }, index) => ({
      index,
      text,
      finish_reason: textReason(reason),
      logprobs: textLogprobs(scores),
    })),
    usage,
  }),
};

/** A completion has no calls. */
function textReason(reason: openai.FinishReason): openai.TextFinishReason {
  return reason === "tool_calls" ? "stop" : reason;
}

function chatLogprobs(scores: readonly TokenScore[]): openai.ChatLogprobs {
  const content = scores.map(({ token, logprob, top }) => ({
    ...withBytes(token, logprob),
    top_logprobs: top.map((other) => withBytes(other.token, other.logprob)),
  }));
  return { content };
}

function withBytes(token: string, logprob: number): openai.TokenLogprob {
  return { token, logprob, bytes: [...new TextEncoder().encode(token)] };
}
