/** One side's part of an answer, for accounting. */

import type { HandoverEvent } from "./handover.js";
import { type ChunkContents, type Leg, tokensIn } from "./leg.js";
import type { Usage } from "./openai.js";
import type { Ticket } from "./plan.js";
import type { Router } from "./router.js";
import type { Watch } from "./watch.js";

/** One side's part, for accounting. `task`: its next event, when both sides are awaited. */
export interface Attempt extends Leg {
  readonly ticket: Ticket;
  readonly watch: Watch | null;
  /** Tokens of the answer before this part, and in it. */
  readonly before: number;
  count: number;
  usage: Usage | null;
  readonly asked: number;
  first: number;
  last: number;
  task: Promise<Happened> | null;
}

export interface Happened {
  readonly event: HandoverEvent;
  readonly piece: ChunkContents | null;
}

/** Makes an attempt that begins now. `before`: tokens of the answer so far. */
export function attempt(leg: Leg, ticket: Ticket, watch: Watch | null, before: number): Attempt {
  const account = { before, count: 0, usage: null, asked: performance.now(), first: 0, last: 0 };
  return { ...leg, ...account, ticket, watch, task: null };
}

/** Records a piece; returns its number of tokens. */
export function heard(attempt: Attempt, piece: ChunkContents): number {
  attempt.usage = piece.usage ?? attempt.usage;
  const tokens = tokensIn(piece);
  if (tokens === 0) return 0;
  attempt.count += tokens;
  attempt.last = performance.now();
  attempt.first ||= attempt.last;
  return tokens;
}

/** The usage as the side reports it, else as counted. `prompt`: tokens of the request. */
export function usedBy({ before, count, usage }: Attempt, prompt: number): Usage {
  const read = usage?.prompt_tokens ?? prompt + before;
  return usage ?? { prompt_tokens: read, completion_tokens: count, total_tokens: read + count };
}

/** Updates the side's speed from a part that ended well. `prompt`: tokens that it read. */
export function learn(
  router: Pick<Router, "speeds" | "warm">,
  { ticket: { side }, count, usage, asked, first, last }: Attempt,
  prompt: number,
): void {
  if (first === 0) return;
  const { speeds, warm } = router;
  const fresh = prompt - (usage?.prompt_tokens_details?.cached_tokens ?? 0);
  if (side === "cloud") speeds.cloud.firstToken((first - asked) / 1000, fresh);
  else if (warm) speeds.device.prefill(fresh, (first - asked) / 1000);
  if (side === "cloud" || warm) speeds[side].decode(count - 1, (last - first) / 1000);
  router.warm ||= side === "device";
}
