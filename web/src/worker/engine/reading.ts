import type { Request } from "./request.js";

/**
 * Reports how much has been read of the prompts that take more than a step, summed over all such prompts in
 * progress.
 */
export class Reading {
  /** Tokens of the prompts of the last report; 0 if no such prompt is in progress. */
  #total = 0;

  constructor(private readonly tell: ((read: number, total: number) => void) | undefined) {}

  /** Reports progress after a step has been read, before its tokens are told. */
  after(requests: readonly Request[]): void {
    let [read, total] = [0, 0];
    for (const request of requests) {
      const { length } = request.prompt;
      if (request.hasToken || request.read === 0 || request.read >= length) continue;
      read += request.read;
      total += length;
    }
    if (total === 0) this.end();
    else this.tell?.(read, total);
    this.#total = total;
  }

  /** Reports the end, because no prompt is being read any more. */
  end(): void {
    if (this.#total > 0) this.tell?.(this.#total, this.#total);
    this.#total = 0;
  }
}
