import type {
  LanguageModelV4CallOptions,
  LanguageModelV4Content,
  LanguageModelV4FinishReason,
  LanguageModelV4ResponseMetadata,
  LanguageModelV4StreamPart,
  LanguageModelV4Usage,
  SharedV4Warning,
} from "@ai-sdk/provider";
import { addCall } from "../protocol/calls.js";
import type {
  ChatChoice,
  ChatChunkChoice,
  ChatCompletionChunk,
  ToolCall,
  Usage,
} from "../protocol/openai.js";
import { parsed } from "./tools.js";

const REASONS: Readonly<Record<string, LanguageModelV4FinishReason["unified"]>> = {
  stop: "stop",
  length: "length",
  tool_calls: "tool-calls",
  content_filter: "content-filter",
};

export function finishReasonOf(raw: string | null): LanguageModelV4FinishReason {
  return { unified: (raw !== null && REASONS[raw]) || "other", raw: raw ?? undefined };
}

/** A cloud behind a HybridClient may leave out fields. */
export function usageOf(usage: Usage | undefined): LanguageModelV4Usage {
  const { prompt_tokens: total, completion_tokens: written } = usage ?? {};
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const noCache = total !== undefined && cached !== undefined ? total - cached : undefined;
  return {
    inputTokens: { total, noCache, cacheRead: cached, cacheWrite: undefined },
    outputTokens: { total: written, text: written, reasoning: undefined },
  };
}

export function metadataOf(reply: {
  readonly id: string;
  readonly created: number;
  readonly model: string;
}): LanguageModelV4ResponseMetadata {
  return { id: reply.id, timestamp: new Date(reply.created * 1000), modelId: reply.model };
}

export function contentOf({ message, finish_reason }: ChatChoice): LanguageModelV4Content[] {
  const { content, reasoning_content, tool_calls = [] } = message;
  return [
    ...(reasoning_content ? [{ type: "reasoning", text: reasoning_content } as const] : []),
    ...(content ? [{ type: "text", text: content } as const] : []),
    ...tool_calls.filter((call) => isWhole(call, finish_reason)).map(callOf),
  ];
}

/**
 * Whether the arguments of a call are complete. Only an answer that was cut can have an incomplete call,
 * which must not be made.
 */
function isWhole({ function: called }: ToolCall, reason: string | null): boolean {
  return reason !== "length" || parsed(called.arguments) !== undefined;
}

function callOf({ id, function: called }: ToolCall) {
  return {
    type: "tool-call",
    toolCallId: id,
    toolName: called.name,
    input: called.arguments || "{}",
  } as const;
}

/**
 * Converts the engine's chunks to the AI SDK's parts. An error becomes a part and ends the answer; an abort
 * throws, which is how the AI SDK recognizes it.
 */
export async function* partsOf(
  chunks: AsyncIterable<ChatCompletionChunk>,
  warnings: SharedV4Warning[],
  { abortSignal, includeRawChunks }: LanguageModelV4CallOptions,
): AsyncGenerator<LanguageModelV4StreamPart> {
  yield { type: "stream-start", warnings };
  let first = true;
  let usage: Usage | undefined;
  let finishReason = finishReasonOf(null);
  const blocks = new Blocks();
  try {
    for await (const chunk of chunks) {
      if (includeRawChunks) yield { type: "raw", rawValue: chunk };
      if (first) yield { type: "response-metadata", ...metadataOf(chunk) };
      first = false;
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (choice) yield* blocks.next(choice);
      if (choice?.finish_reason) finishReason = finishReasonOf(choice.finish_reason);
    }
  } catch (error) {
    if (abortSignal?.aborted) throw error;
    yield { type: "error", error };
    finishReason = { unified: "error", raw: undefined };
  }
  yield* blocks.end(finishReason.raw ?? "length");
  yield { type: "finish", usage: usageOf(usage), finishReason };
}

/** The blocks of an answer; one block at a time is open. */
class Blocks {
  #open: { readonly type: "text" | "reasoning" | "tool-input"; readonly id: string } | null = null;
  #count = 0;
  readonly #calls: ToolCall[] = [];

  *next({ delta }: ChatChunkChoice): Generator<LanguageModelV4StreamPart> {
    if (delta.reasoning_content) yield* this.#written("reasoning", delta.reasoning_content);
    if (delta.content) yield* this.#written("text", delta.content);
    for (const call of delta.tool_calls ?? []) {
      if (call.id) yield* this.end();
      addCall(this.#calls, call);
      if (call.id) {
        this.#open = { type: "tool-input", id: call.id };
        yield { type: "tool-input-start", id: call.id, toolName: call.function?.name ?? "" };
      }
      const id = this.#calls[call.index]?.id ?? "";
      const piece = call.function?.arguments;
      if (piece) yield { type: "tool-input-delta", id, delta: piece };
    }
  }

  /** Closes the open block. `reason` says why the answer ended; null if it continues. */
  *end(reason: string | null = null): Generator<LanguageModelV4StreamPart> {
    if (!this.#open) return;
    yield { type: `${this.#open.type}-end`, id: this.#open.id };
    const call = this.#calls.at(-1);
    if (this.#open.type === "tool-input" && call && isWhole(call, reason)) yield callOf(call);
    this.#open = null;
  }

  *#written(type: "text" | "reasoning", delta: string): Generator<LanguageModelV4StreamPart> {
    if (this.#open?.type !== type) {
      yield* this.end();
      this.#open = { type, id: String(this.#count++) };
      yield { type: `${type}-start`, id: this.#open.id };
    }
    yield { type: `${type}-delta`, id: this.#open.id, delta };
  }
}
