import type { LoadStep } from "../../protocol/messages.js";

/** The share of the weights in a first load; the rest is for kernels, which are compiled at the same time. */
const WEIGHTS = 0.8;
/** The part of WEIGHTS for what follows after a byte has come: verification and upload to the device. */
const UPLOAD = 0.1;

/** The fraction of a load that is done. */
export class LoadFraction {
  #weights = 0;
  #kernels = 0;
  #told = 0;
  #isReady = false;

  /**
   * Returns the fraction after this message: never less than before, 1 when the model is ready, undefined
   * from then on.
   */
  after(step: LoadStep): number | undefined {
    if (this.#isReady) return undefined;
    if (step.phase === "weights")
      this.#weights =
        (1 - UPLOAD) * part(step.loaded, step.total) + UPLOAD * part(step.uploaded ?? 0, step.total);
    if (step.phase === "kernels") this.#kernels = part(step.compiled, step.total);
    this.#isReady = step.phase === "ready";
    // The work after the last byte and the last kernel takes time too.
    const sum = 0.99 * (WEIGHTS * this.#weights + (1 - WEIGHTS) * this.#kernels);
    this.#told = this.#isReady ? 1 : Math.max(this.#told, sum);
    return this.#told;
  }
}

function part(done: number, total: number): number {
  return total > 0 ? Math.min(done / total, 1) : 0;
}
