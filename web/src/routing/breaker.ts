/**
 * A circuit breaker for the cloud. Callers pass the time (seconds on any monotonic clock); nothing is random.
 */

import { type BreakerOptions, DEFAULT_POLICY } from "./policy.js";

/**
 * The kind of a call: `begin` returns it, and the end of the call gives it back. Only a probe can close an
 * open circuit, or keep it open.
 */
export type Pass = "request" | "probe";

/**
 * Opens after failures in a row. When its time is over, it admits one probe at a time, and closes if a probe
 * succeeds.
 *
 * In addition, the cloud may request a pause (`hold`: a 429 with Retry-After): then it counts as working, but
 * no call is admitted.
 */
export class Breaker {
  #failures = 0;
  #opened: number | null = null;
  #heldUntil = 0;
  #probing = false;
  #period: number;

  constructor(private readonly options: BreakerOptions = DEFAULT_POLICY.breaker) {
    this.#period = options.seconds;
  }

  /** The state. Half open means that a probe may start, or is under way. */
  state(now: number): "closed" | "half_open" | "open" {
    if (this.#opened === null) return "closed";
    return now - this.#opened >= this.#period ? "half_open" : "open";
  }

  /** Whether a call may start now. */
  allows(now: number): boolean {
    if (now < this.#heldUntil) return false;
    const state = this.state(now);
    return state === "closed" || (state === "half_open" && !this.#probing);
  }

  /** Seconds until a call may start, as far as time alone decides; 0 means now. */
  retryAfter(now: number): number {
    const opens = this.#opened === null ? 0 : this.#opened + this.#period;
    return Math.max(opens - now, this.#heldUntil - now, 0);
  }

  /** Starts a call; its end gives the returned kind back. Null where the call may not start. */
  begin(now: number): Pass | null {
    if (!this.allows(now)) return null;
    if (this.state(now) === "closed") return "request";
    this.#probing = true;
    return "probe";
  }

  /** Records an answered call. A late answer from before the circuit opened changes nothing. */
  success(given: Pass): void {
    if (given !== "probe" && this.#opened !== null) return;
    this.#failures = 0;
    this.#opened = null;
    this.#probing = false;
    this.#period = this.options.seconds;
  }

  failure(now: number, given: Pass): void {
    if (given === "probe") {
      this.#probing = false;
      this.#opened = now;
      this.#period = Math.min(this.#period * 2, this.options.max_seconds);
    } else if (this.#opened === null) {
      this.#failures += 1;
      if (this.#failures >= this.options.failures) this.#opened = now;
    }
  }

  /**
   * Records a call that ended without evidence about the cloud: the caller left, or the request was rejected.
   */
  abandoned(given: Pass): void {
    if (given === "probe") this.#probing = false;
  }

  /** Admits no calls for `seconds`, as the cloud requested. */
  hold(now: number, seconds: number): void {
    this.#heldUntil = Math.max(this.#heldUntil, now + seconds);
  }
}
