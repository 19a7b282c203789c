/** One side's part of an answer: a stream of pieces, whoever writes it. */

import type { Chunk, ChunkChoice, Usage } from "./openai.js";
import type { Side } from "./types.js";

export interface Leg {
  readonly side: Side;
  readonly pieces: AsyncGenerator<ChunkContents>;
  /** Ends it; pending reads reject. */
  readonly abort: () => void;
}

/** The contents of one chunk. */
export interface ChunkContents {
  readonly choices: readonly ChunkChoice[];
  readonly usage: Usage | null;
  readonly model: string;
}

export function pieceOf(chunk: Chunk): ChunkContents {
  return { choices: chunk.choices, usage: chunk.usage ?? null, model: chunk.model };
}

/** Whether a choice has a part of the answer, and not only its frame. */
export function isUseful({ delta, finish_reason, logprobs }: ChunkChoice): boolean {
  if (logprobs?.content?.length) return true;
  return !!finish_reason || hasText(delta.content) || hasText(delta.reasoning_content) || !!delta.tool_calls;
}

/** Number of tokens of a choice's delta: exact where their logprobs are known. */
export function tokensOf({ delta, logprobs }: ChunkChoice): number {
  const scored = logprobs?.content?.length ?? 0;
  const written = hasText(delta.content) || hasText(delta.reasoning_content) || !!delta.tool_calls;
  return scored || (written ? 1 : 0);
}

export function tokensIn({ choices }: ChunkContents): number {
  return choices.reduce((sum, choice) => sum + tokensOf(choice), 0);
}

function hasText(text: string | null | undefined): boolean {
  return text !== undefined && text !== null && text !== "";
}

/** Whether it is the answer's last piece: a stream without it was cut. */
export function ends({ choices }: ChunkContents): boolean {
  return choices.some(({ finish_reason }) => finish_reason !== null && finish_reason !== undefined);
}
