/** Recent speed of each side: exponentially weighted means of measurements. */

/** Weight of a new measurement. */
const WEIGHT = 0.3;
/** Least tokens of a measured prefill: a shorter one measures launches, not the device. */
const MIN_PREFILL = 16;
const MIN_DECODE = 4;

/**
 * Tokens per second, and seconds to the first token without prefill (`round_trip`). Null: not measured yet.
 */
export interface SpeedRecord {
  readonly prefill_tps: number | null;
  readonly decode_tps: number | null;
  readonly round_trip: number | null;
}

export class Speeds implements SpeedRecord {
  prefill_tps: number | null = null;
  decode_tps: number | null = null;
  round_trip: number | null = null;

  /** Notes that a prompt of `tokens` uncached tokens took `seconds`. */
  prefill(tokens: number, seconds: number): void {
    if (tokens >= MIN_PREFILL && seconds > 0) this.prefill_tps = mean(this.prefill_tps, tokens / seconds);
  }

  /** Notes that `tokens` tokens came in `seconds`, counted from the token before them. */
  decode(tokens: number, seconds: number): void {
    if (tokens >= MIN_DECODE && seconds > 0) this.decode_tps = mean(this.decode_tps, tokens / seconds);
  }

  /**
   * Notes that the first token came after `seconds`. The known time of prefill is subtracted from the round
   * trip.
   */
  firstToken(seconds: number, uncachedTokens: number): void {
    const prefill = this.prefill_tps ? uncachedTokens / this.prefill_tps : 0;
    this.round_trip = mean(this.round_trip, Math.max(seconds - prefill, 0));
  }

  record(): SpeedRecord {
    return { prefill_tps: this.prefill_tps, decode_tps: this.decode_tps, round_trip: this.round_trip };
  }

  static restored(data: Partial<SpeedRecord>): Speeds {
    const { prefill_tps = null, decode_tps = null, round_trip = null } = data;
    return Object.assign(new Speeds(), { prefill_tps, decode_tps, round_trip });
  }
}

function mean(old: number | null, measured: number): number {
  return old === null ? measured : old + WEIGHT * (measured - old);
}
