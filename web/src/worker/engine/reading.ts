import type { Request } from "./request.js";
import type { Step } from "./scheduler.js";

/** Tells how much is read of prompts that take more than a step: of all that are under way, together. */
export class Reading {
  /** Tokens of the prompts that were told of; 0: of none. */
  #total = 0;

  constructor(private readonly tell: ((read: number, total: number) => void) | undefined) {}

  /** The step has been read; its tokens are not told yet. */
  after(step: Step, requests: readonly Request[]): void {
    for (const chunk of step.chunks) if (chunk) chunk.request.read = chunk.start + chunk.count;
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

  /** Nothing is read any more. */
  end(): void {
    if (this.#total > 0) this.tell?.(this.#total, this.#total);
    this.#total = 0;
  }
}
