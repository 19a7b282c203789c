/** One side's part of an answer: a stream of pieces, whoever writes it. */

import type { Chunk, ChunkChoice, FinishReason, TokenLogprob, Usage } from "./openai.js";
import type { Side } from "./types.js";

export interface Leg {
  readonly side: Side;
  readonly pieces: AsyncGenerator<Piece>;
  /** Ends it; what is pending rejects. */
  readonly abort: () => void;
}

/** What one chunk brings. */
export interface Piece {
  readonly choices: readonly ChunkChoice[];
  readonly usage: Usage | null;
  readonly model: string;
}

export type Score = TokenLogprob & { readonly top_logprobs: readonly TokenLogprob[] };

export function pieceOf(chunk: Chunk): Piece {
  return { choices: chunk.choices, usage: chunk.usage ?? null, model: chunk.model };
}

/** Whether a choice has something of the answer, and not only its frame. */
export function isUseful({ delta, finish_reason }: ChunkChoice): boolean {
  return finish_reason !== null || hasText(delta.content) || hasText(delta.reasoning_content) || !!delta.tool_calls;
}

/** How many tokens a choice's delta stands for: exact where their logprobs are known. */
export function tokensOf({ delta, logprobs }: ChunkChoice): number {
  const scored = logprobs?.content?.length ?? 0;
  const written = hasText(delta.content) || hasText(delta.reasoning_content) || !!delta.tool_calls;
  return scored || (written ? 1 : 0);
}

function hasText(text: string | null | undefined): boolean {
  return text !== undefined && text !== null && text !== "";
}

/** Fails where a stream ends before all its choices have: a cut connection ends like a finished one. */
export class FinishCheck {
  readonly #finished = new Map<number, FinishReason>();

  constructor(private readonly n: number) {}

  see({ choices }: Piece): void {
    for (const { index, finish_reason } of choices) if (finish_reason) this.#finished.set(index, finish_reason);
  }

  get complete(): boolean {
    return this.#finished.size >= this.n;
  }
}
