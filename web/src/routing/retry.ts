/** Trying the cloud again without a storm: a bound for each wait, and a budget that all requests share. */

import { DEFAULT_POLICY, type RetryOptions } from "./policy.js";

/**
 * Seconds to wait before the retry `attempt` (0 is the first); null: do not try again.
 *
 * "Full jitter": `random` is uniform in [0, 1). What Retry-After asks for (seconds) is waited in full, and
 * the jitter after it.
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

/** A bucket of retries: each request puts in a share of one, each retry takes out a whole one. */
export class RetryBudget {
  left: number;

  constructor(private readonly options: RetryOptions = DEFAULT_POLICY.retry) {
    this.left = options.burst;
  }

  /** A request was made (not a retry). */
  request(): void {
    this.left = Math.min(this.left + this.options.ratio, this.options.burst);
  }

  /** Whether one more retry may go; if so, it is paid for. */
  withdraw(): boolean {
    if (this.left < 1) return false;
    this.left -= 1;
    return true;
  }
}
