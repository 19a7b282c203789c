/** Checks a cloud's chunks: no value of a wrong type gets into an answer. */

import { CloudError } from "../protocol/errors.js";
import type { ChunkContents } from "./leg.js";
import type {
  ChunkChoice,
  Delta,
  FinishReason,
  Logprobs,
  TokenLogprob,
  ToolCallDelta,
  Usage,
} from "./openai.js";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Returns the piece in a chunk. CloudError ("shape") where it has not OpenAI's shape, ("error") where it is
 * an error.
 */
export function pieceIn(value: unknown): ChunkContents {
  const { error, choices, usage, model } = fields(value, "a chunk");
  if (error !== undefined && error !== null) {
    const { message } = typeof error === "object" ? (error as Fields) : { message: error };
    throw new CloudError(
      `The cloud broke off: ${typeof message === "string" ? message : "no reason given"}`,
      "error",
    );
  }
  return {
    choices: list(choices, "choices").map(choiceIn),
    usage: usage ? usageIn(fields(usage, "usage")) : null,
    model: typeof model === "string" ? model : "",
  };
}

function choiceIn(value: unknown): ChunkChoice {
  const { delta, finish_reason, logprobs } = fields(value, "a choice");
  const { content } = logprobs ? fields(logprobs, "logprobs") : { content: null };
  return {
    index: 0,
    delta: deltaIn(fields(delta ?? {}, "delta")),
    finish_reason: text(finish_reason, "finish_reason") as FinishReason | null,
    logprobs: content
      ? ({ content: list(content, "logprobs.content").map(scored) } satisfies Logprobs)
      : null,
  };
}

function deltaIn({ content, reasoning_content, reasoning, tool_calls }: Fields): Delta {
  const said = text(content, "content");
  const thought = text(reasoning_content ?? reasoning, "reasoning_content");
  const calls = list(tool_calls, "tool_calls").map(callIn);
  return {
    ...(said !== null && { content: said }),
    ...(thought !== null && { reasoning_content: thought }),
    ...(calls.length > 0 && { tool_calls: calls }),
  };
}

function callIn(value: unknown): ToolCallDelta {
  const call = fields(value, "a tool call");
  const { name, arguments: given } = fields(call["function"] ?? {}, "function");
  const index = whole(call["index"] ?? 0, "index");
  // The index becomes the length of a list.
  if (index > 1000) throw shape("index");
  const id = text(call["id"], "id");
  const [called, args] = [text(name, "name"), text(given, "arguments")];
  return {
    index,
    ...(id !== null && { id }),
    type: "function",
    function: { ...(called !== null && { name: called }), ...(args !== null && { arguments: args }) },
  };
}

function scored(value: unknown): Logprobs["content"][number] {
  const token = fields(value, "a logprob");
  return {
    ...one(token),
    top_logprobs: list(token["top_logprobs"], "top_logprobs").map((item) => one(fields(item, "a logprob"))),
  };
}

function one({ token, logprob, bytes }: Fields): TokenLogprob {
  if (typeof logprob !== "number") throw shape("logprob");
  return {
    token: text(token, "token") ?? "",
    logprob,
    bytes: list(bytes, "bytes").map((byte) => whole(byte, "bytes")),
  };
}

function usageIn({ prompt_tokens, completion_tokens, prompt_tokens_details: details }: Fields): Usage {
  const [prompt, completion] = [
    whole(prompt_tokens, "prompt_tokens"),
    whole(completion_tokens ?? 0, "completion_tokens"),
  ];
  const cached = details ? fields(details, "prompt_tokens_details")["cached_tokens"] : null;
  return {
    prompt_tokens: prompt,
    completion_tokens: completion,
    total_tokens: prompt + completion,
    ...(typeof cached === "number" && {
      prompt_tokens_details: { cached_tokens: whole(cached, "cached_tokens") },
    }),
  };
}

function fields(value: unknown, what: string): Fields {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw shape(what);
  return value as Fields;
}

function list(value: unknown, what: string): readonly unknown[] {
  if (value === undefined || value === null) return [];
  if (!Array.isArray(value)) throw shape(what);
  return value;
}

function text(value: unknown, what: string): string | null {
  if (value === undefined || value === null) return null;
  if (typeof value !== "string") throw shape(what);
  return value;
}

function whole(value: unknown, what: string): number {
  if (!Number.isSafeInteger(value) || Number(value) < 0) throw shape(what);
  return Number(value);
}

function shape(what: string): CloudError {
  return new CloudError(`The cloud's answer does not have the shape of a chat completion: ${what}.`, "shape");
}
