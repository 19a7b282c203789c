import type { LoadStep, ModelCard } from "../protocol/messages.js";
import { compilingOn, keepMeasure, speedOf } from "../storage/measures.js";

/** Smaller downloads measure latency, not bandwidth. */
const LEAST_BYTES = 65_536;

/** The start, the end and the amount of a growth. */
class Growth {
  #first: readonly [at: number, amount: number] | null = null;
  #last: readonly [at: number, amount: number] = [0, 0];

  note(amount: number): void {
    if (this.#first && amount <= this.#last[1]) return;
    this.#last = [performance.now(), amount];
    this.#first ??= this.#last;
  }

  get amount(): number {
    return this.#last[1] - (this.#first ?? this.#last)[1];
  }

  get seconds(): number {
    return (this.#last[0] - (this.#first ?? this.#last)[0]) / 1000;
  }
}

/** Measures the speed of a first load; `isSupported` uses it for predictions. */
export class Meter {
  readonly #bytes = new Growth();
  readonly #kernels = new Growth();

  hear(step: LoadStep): void {
    if (step.phase === "weights" && step.loaded > step.cached) this.#bytes.note(step.loaded - step.cached);
    if (step.phase === "kernels") this.#kernels.note(step.compiled);
  }

  /**
   * Stores the speeds at the end of the load. A load from the browser's storage measures nothing, because its
   * kernels were compiled before.
   */
  keep(url: URL, { adapter }: ModelCard, hasDownloaded: boolean): void {
    if (!hasDownloaded) return;
    const [bytes, kernels] = [this.#bytes, this.#kernels];
    if (bytes.amount >= LEAST_BYTES) keepMeasure(speedOf(url), bytes.amount / bytes.seconds);
    keepMeasure(compilingOn(adapter), kernels.seconds / kernels.amount);
  }
}
