/** A difficulty threshold that follows a target share of cloud calls, and limits chosen from a sample. */

import { type CalibrationOptions, DEFAULT_POLICY } from "./policy.js";

/** The state of a threshold between visits. */
export interface ThresholdRecord {
  readonly share: number;
  readonly threshold: number;
  readonly seen: number;
}

/**
 * An online estimate of the (1 − `share`) quantile of the difficulties seen (Robbins and Monro, 1951): each
 * prompt above moves the threshold up by step·(1 − share), each below down by step·share. The step shrinks
 * with 1/√n to a floor.
 */
export class Threshold {
  constructor(
    private readonly share: number,
    public value: number,
    private readonly options: CalibrationOptions = DEFAULT_POLICY.calibration,
    public seen = 0,
  ) {}

  /** Learns from the difficulty of a prompt. Returns the new threshold. */
  observe(difficulty: number): number {
    this.seen += 1;
    const step = Math.max(this.options.floor, this.options.rate / Math.sqrt(this.seen));
    const moved = this.value + step * ((difficulty >= this.value ? 1 : 0) - this.share);
    this.value = Math.min(Math.max(moved, 0), 1);
    return this.value;
  }

  record(): ThresholdRecord {
    return { share: this.share, threshold: this.value, seen: this.seen };
  }

  /** Restores a kept state. Another share counts its steps again, from the threshold that was reached. */
  static restored(
    data: Partial<ThresholdRecord>,
    share: number,
    start: number,
    options: CalibrationOptions = DEFAULT_POLICY.calibration,
  ): Threshold {
    const value = Math.min(Math.max(data.threshold ?? start, 0), 1);
    return new Threshold(share, value, options, data.share === share ? (data.seen ?? 0) : 0);
  }
}

/**
 * Returns the value at rank `share` of the sorted values: that fraction of them, rounded down, is below it.
 * Needs at least one value.
 */
export function limitFor(values: readonly number[], share: number): number {
  const ordered = [...values].sort((a, b) => a - b);
  const limit = ordered[Math.min(Math.floor(share * ordered.length), ordered.length - 1)];
  if (limit === undefined) throw new RangeError("a limit needs at least one value");
  return limit;
}
