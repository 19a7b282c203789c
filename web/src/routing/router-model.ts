/** The JSON of a fitted router, as `nearfar route fit` writes it; docs/routing.md explains the fields. */

/**
 * A direction of the last hidden row, through the output matrix: the sum of `weights` times the
 * log-probabilities of `tokens`, less their mean. `mean` is the sum's mean over the examples.
 */
export interface Probe {
  readonly tokens: readonly number[];
  readonly weights: readonly number[];
  readonly mean: number;
}

/** Logistic regression: bias + Σ weights · (features − mean) / scale + probe. */
export interface Regression {
  readonly features: readonly string[];
  readonly mean: readonly number[];
  readonly scale: readonly number[];
  readonly weights: readonly number[];
  readonly bias: number;
  /** The AUROC of examples that were kept back. */
  readonly auroc: number;
  readonly probe: Probe | null;
}

/** A point of the curve; `money`: the cloud's price of a thousand requests. */
export interface RouterPoint {
  readonly share: number;
  readonly threshold: number;
  readonly limit: number | null;
  readonly quality: number;
  readonly money: number | null;
}

/**
 * A router: `prompt` decides before the first token, from `threshold` on for the cloud; `answer` decides when
 * `tokens` tokens of the device's answer have come, from `limit` on for the cloud.
 */
export interface RouterModel {
  readonly format: string;
  readonly version: number;
  readonly model: string;
  /** The checkpoint's SHA-256 and the quantization scheme of the artifact that it was fitted to. */
  readonly artifact: string;
  readonly examples: number;
  readonly prompt: Regression;
  readonly threshold: number;
  readonly answer: Regression | null;
  readonly limit: number | null;
  readonly tokens: number;
  readonly curve: readonly RouterPoint[];
}

/** The router that decides nothing, and has the client record what a router would look at. */
export const RECORD = "record";
