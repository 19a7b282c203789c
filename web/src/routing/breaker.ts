/**
 * A circuit breaker for the cloud. Time is passed in (seconds on any clock that only goes forward); nothing
 * is random.
 */

import { type BreakerOptions, DEFAULT_POLICY } from "./policy.js";

/**
 * What `begin` gives out and the end of the call gives back. Only a probe can close an open circuit, or keep
 * it open.
 */
export type Pass = "request" | "probe";

/**
 * Opens after failures in a row; when its time is over lets one probe at a time through, and closes if that
 * is well.
 *
 * Apart from that the cloud may ask for silence (`hold`: a 429 with Retry-After): then it works, but nothing
 * is sent.
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

  /** Half open: a probe may go, or is under way. */
  state(now: number): "closed" | "half_open" | "open" {
    if (this.#opened === null) return "closed";
    return now - this.#opened >= this.#period ? "half_open" : "open";
  }

  /** Whether a call may go now. */
  allows(now: number): boolean {
    if (now < this.#heldUntil) return false;
    const state = this.state(now);
    return state === "closed" || (state === "half_open" && !this.#probing);
  }

  /** Seconds until a call may go, as far as time alone decides; 0: now. */
  retryAfter(now: number): number {
    const opens = this.#opened === null ? 0 : this.#opened + this.#period;
    return Math.max(opens - now, this.#heldUntil - now, 0);
  }

  /** A call goes, and gives this back when it ends. Null: it may not go. */
  begin(now: number): Pass | null {
    if (!this.allows(now)) return null;
    if (this.state(now) === "closed") return "request";
    this.#probing = true;
    return "probe";
  }

  /** A call was answered. A late answer from before the circuit opened says nothing of now. */
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

  /** A call ended without telling anything of the cloud: the caller left, or the request was refused. */
  abandoned(given: Pass): void {
    if (given === "probe") this.#probing = false;
  }

  /** The cloud asked to be left alone for so long. */
  hold(now: number, seconds: number): void {
    this.#heldUntil = Math.max(this.#heldUntil, now + seconds);
  }
}
