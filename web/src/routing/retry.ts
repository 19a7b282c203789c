/** Retries to the cloud without a storm: a bound for each wait, and a budget that all requests share. */

import { DEFAULT_POLICY, type RetryOptions } from "./policy.js";

/**
 * Seconds to wait before the retry `attempt` (0 is the first); null: do not retry.
 *
 * "Full jitter": `random` is uniform in [0, 1). The wait of Retry-After (seconds) is kept in full, and the
 * jitter is added to it.
 */
export function backoff(
  attempt: number,
  random: number,
  retryAfter: number | null,
  options: RetryOptions,
): number | null {
  if (attempt >= options.attempts) return null;
  const wait = (retryAfter ?? 0) + random * Math.min(options.cap, options.base * 2 ** attempt);
  return wait <= options.max_wait ? wait : null;
}

/** A bucket of retries: each request adds a fraction of one, each retry takes a whole one. */
export class RetryBudget {
  left: number;

  constructor(private readonly options: RetryOptions = DEFAULT_POLICY.retry) {
    this.left = options.burst;
  }

  /** Records a request (not a retry). */
  request(): void {
    this.left = Math.min(this.left + this.options.ratio, this.options.burst);
  }

  /** Takes one retry from the budget. Returns false where there is none. */
  withdraw(): boolean {
    if (this.left < 1) return false;
    this.left -= 1;
    return true;
  }
}
