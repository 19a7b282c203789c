/**
 * Watches an answer while it is generated: log-probabilities, entropy and repetition show when a model goes
 * wrong.
 */

import { DEFAULT_POLICY, type MonitorOptions } from "./policy.js";
import { type Reason, reason } from "./types.js";

/**
 * A token of the answer. `top`: log-probabilities of the likeliest tokens, which may include the chosen one.
 */
export interface WatchedToken {
  readonly text: string;
  readonly logprob: number | null;
  readonly top: readonly number[];
}

/**
 * Lower bound of the entropy in nats: the probability that the given tokens leave counts as one more token.
 */
export function entropy(top: readonly number[]): number {
  let rest = 1;
  let known = 0;
  for (const logprob of top) {
    const probability = Math.exp(logprob);
    rest -= probability;
    if (probability > 0) known -= probability * logprob;
  }
  return rest > 1e-12 ? known - rest * Math.log(rest) : known;
}

/** The most first tokens of an answer that are kept for a fitted router. */
export const FIRST_TOKENS = 16;

/** A token of an answer's beginning: its log-probability, and the entropy of the likeliest tokens there. */
export type First = readonly [logprob: number, entropy: number];

/**
 * Why the cloud should answer instead, or null, from the first tokens of an answer, and whether it has ended with
 * them.
 */
export type Doubt = (first: readonly First[], ended: boolean) => Reason | null;

/**
 * Watches the tokens of one answer, in order. The lowest and highest means are for calibration, `first` are the
 * first tokens that had both figures; `doubt` is asked after each.
 */
export class Monitor {
  readonly first: First[] = [];
  lowestLogprob: number | null = null;
  highestEntropy: number | null = null;
  readonly #logprobs: number[] = [];
  readonly #entropies: number[] = [];
  readonly #texts: string[] = [];
  /** By distance: how many tokens in a row equal the token at that distance before them. */
  readonly #runs: number[];
  #count = 0;

  constructor(
    private readonly options: MonitorOptions = DEFAULT_POLICY.monitor,
    private readonly doubt: Doubt | null = null,
  ) {
    this.#runs = new Array<number>(options.period + 1).fill(0);
  }

  /** Takes the next token. Returns why the answer should be escalated, or null to continue. */
  push({ text, logprob, top }: WatchedToken): Reason | null {
    this.#count += 1;
    const { window, min_tokens } = this.options;
    // One impossible token must not dominate every mean.
    if (logprob !== null) keep(this.#logprobs, Math.max(logprob, -100), window);
    if (top.length > 0) keep(this.#entropies, entropy(top), window);
    const repeated = this.#repetition(text);
    const doubtful = logprob === null || top.length === 0 ? null : this.#doubtful();
    if (doubtful) return doubtful;
    if (this.#count < min_tokens) return null;
    return this.#lowLogprob() ?? this.#highEntropy() ?? repeated;
  }

  #doubtful(): Reason | null {
    if (this.#count > FIRST_TOKENS) return null;
    this.first.push([this.#logprobs.at(-1) ?? 0, this.#entropies.at(-1) ?? 0]);
    return this.doubt?.(this.first, false) ?? null;
  }

  /** Judges an answer that has ended before its router had enough tokens; null: the answer may stay. */
  end(): Reason | null {
    return this.doubt?.(this.first, true) ?? null;
  }

  #lowLogprob(): Reason | null {
    if (this.#logprobs.length === 0) return null;
    const value = mean(this.#logprobs);
    const limit = this.options.logprob;
    this.lowestLogprob = Math.min(this.lowestLogprob ?? value, value);
    return limit !== null && value < limit ? reason("low_logprob", "device", value, limit) : null;
  }

  #highEntropy(): Reason | null {
    if (this.#entropies.length === 0) return null;
    const value = mean(this.#entropies);
    const limit = this.options.entropy;
    this.highestEntropy = Math.max(this.highestEntropy ?? value, value);
    return limit !== null && value > limit ? reason("high_entropy", "device", value, limit) : null;
  }

  /** Finds the shortest period that ends with this token and has repeated often enough in a row. */
  #repetition(text: string): Reason | null {
    const { repeats, period: longest, min_repeat } = this.options;
    for (let period = 1; period <= this.#texts.length; period++) {
      const same = this.#texts.at(-period) === text;
      this.#runs[period] = same ? (this.#runs[period] ?? 0) + 1 : 0;
    }
    keep(this.#texts, text, longest);
    if (repeats === null) return null;
    for (let period = 1; period <= longest; period++) {
      const run = this.#runs[period] ?? 0;
      // A run of r equal tokens at distance p means r + p tokens that repeat one period.
      if (run > 0 && run + period >= Math.max(repeats * period, min_repeat))
        return reason("repetition", "device", run + period, period);
    }
    return null;
  }
}

function keep<T>(list: T[], item: T, most: number): void {
  list.push(item);
  if (list.length > most) list.shift();
}

function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
