/** Hedging: where the first side is slow to begin, the other one is started too, and whoever says something first goes on. */

import type { Leg, Piece } from "./leg.js";
import { isUseful } from "./leg.js";
import { pause } from "./wait.js";

interface Begun {
  readonly leg: Leg;
  readonly head: readonly Piece[];
}

/**
 * The leg that has something to say first; the other one is ended. `other` is started after `seconds` of silence. Where both
 * fail, or the first one before the other was started, it is the first one, and its pieces fail. `other` may be null: not allowed.
 */
export async function firstUseful(
  first: Leg,
  other: () => Leg | null,
  seconds: number,
  signal: AbortSignal,
): Promise<Leg> {
  const begun = begin(first);
  begun.catch(() => undefined);
  const early = await Promise.race([begun.catch((error: unknown) => ({ error })), pause(seconds, signal)]);
  if (early) return "error" in early ? failing(first, early.error) : joined(early);
  const second = other();
  try {
    return joined(await Promise.any([begun, ...(second ? [begin(second)] : [])]));
  } catch (failures) {
    return failing(first, failures instanceof AggregateError ? failures.errors[0] : failures);
  }
}

async function begin(leg: Leg): Promise<Begun> {
  const head: Piece[] = [];
  for (;;) {
    const { done, value } = await leg.pieces.next();
    if (done) break;
    head.push(value);
    if (value.choices.some(isUseful)) break;
  }
  return { leg, head };
}

function joined({ leg, head }: Begun): Leg {
  async function* pieces(): AsyncGenerator<Piece> {
    yield* head;
    yield* leg.pieces;
  }
  return { ...leg, pieces: pieces() };
}

function failing(leg: Leg, error: unknown): Leg {
  // biome-ignore lint/correctness/useYield: it fails before it gives anything
  async function* pieces(): AsyncGenerator<Piece> {
    throw error;
  }
  return { ...leg, pieces: pieces() };
}
