import type {
  LanguageModelV4CallOptions,
  LanguageModelV4FinishReason,
  LanguageModelV4ResponseMetadata,
  LanguageModelV4StreamPart,
  LanguageModelV4Usage,
  SharedV4Warning,
} from "@ai-sdk/provider";
import type { ChatCompletionChunk, Usage } from "../both/openai.js";

const REASONS: Readonly<Record<string, LanguageModelV4FinishReason["unified"]>> = {
  stop: "stop",
  length: "length",
  content_filter: "content-filter",
};

export function finishReasonOf(raw: string | null): LanguageModelV4FinishReason {
  return { unified: (raw !== null && REASONS[raw]) || "other", raw: raw ?? undefined };
}

/** A cloud behind a HybridClient may leave out what it will. */
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

/** An answer has one block of text. */
const BLOCK = "0";

/**
 * The engine's chunks as the AI SDK's parts. An error on the way is a part and ends the answer; an abort
 * throws, by which the AI SDK knows it.
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
  try {
    for await (const chunk of chunks) {
      if (includeRawChunks) yield { type: "raw", rawValue: chunk };
      if (first) {
        yield { type: "response-metadata", ...metadataOf(chunk) };
        yield { type: "text-start", id: BLOCK };
        first = false;
      }
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (choice?.delta.content) yield { type: "text-delta", id: BLOCK, delta: choice.delta.content };
      if (choice?.finish_reason) finishReason = finishReasonOf(choice.finish_reason);
    }
  } catch (error) {
    if (abortSignal?.aborted) throw error;
    yield { type: "error", error };
    finishReason = { unified: "error", raw: undefined };
  }
  if (!first) yield { type: "text-end", id: BLOCK };
  yield { type: "finish", usage: usageOf(usage), finishReason };
}
