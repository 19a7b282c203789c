import type { HostArray } from "./backend.js";
import { notFinite } from "./faults.js";
import { type Flight, logprobsOf } from "./launches.js";
import type { Constraint, Request, TokenLogprobs } from "./request.js";
import type { ScheduledStep } from "./scheduler.js";

/** The value that a sampler writes instead of a token if no logit is finite. */
const NOT_FINITE = -1;

/** What the engine does after a step has been read. */
export interface Following {
  /** Removes a request that has ended. */
  readonly remove: (request: Request) => void;
  /** Records that a step's results can be relied on. */
  readonly read: (step: ScheduledStep) => void;
  /** Starts the loop again, because there may be work again. */
  readonly goOn: () => void;
}

/**
 * The last part of a step: reads the results of the device, and tells tokens and ends of requests to their
 * listeners.
 */
export class Emitter {
  constructor(
    private readonly endTokens: ReadonlySet<number>,
    private readonly engine: Following,
  ) {}

  /**
   * Tells the results of a step. `embedding` is the number of values of an embedding, for models that give
   * embeddings instead of tokens.
   */
  emit({ step, logprobs }: Flight, [sampled, ...scores]: HostArray[], embedding: number | undefined): void {
    if (embedding) {
      this.#embedded(step, sampled, embedding);
      return;
    }
    step.sampled.forEach((request, row) => {
      request.pending -= 1;
      // The request fails before its pages are entered in the prefix index, because this step computed
      // nothing useful for it.
      if (!request.done && (sampled?.[row] ?? NOT_FINITE) < 0) this.fail(request, notFinite(request));
    });
    const logits = scores.at(-1);
    for (const [at, { request, position }] of step.scored.entries()) {
      const row = step.sampled.length + at;
      const width = (logits?.length ?? 0) / (step.sampled.length + step.scored.length);
      const own = logits?.subarray(row * width, (row + 1) * width);
      if (!request.done && !(own && request.scored?.take(position, own)))
        this.fail(request, notFinite(request));
    }
    this.engine.read(step);
    for (const { request, position } of step.scored)
      if (!request.done && position === request.tokens.length - 1) {
        request.tokenRead();
        this.#finish(request, "stop");
      }
    step.sampled.forEach((request, row) => {
      if (request.done) return;
      const token = sampled?.[row] ?? NOT_FINITE;
      const wanted = logprobs ? request.params.logprobs : null;
      this.#accept(request, token, wanted === null ? null : logprobsOf(scores, row, wanted));
    });
  }

  /**
   * Gives each request of a step its embedding, which is the state of its last token, and ends the request.
   */
  #embedded(step: ScheduledStep, rows: HostArray | undefined, width: number): void {
    this.engine.read(step);
    step.sampled.forEach((request, row) => {
      request.pending -= 1;
      if (request.done) return;
      const values = Float32Array.from(rows?.subarray(row * width, (row + 1) * width) ?? []);
      if (!values.every(Number.isFinite)) this.fail(request, notFinite(request));
      else {
        request.tokenRead();
        request.listener.embedding?.(values);
        this.#finish(request, "stop");
      }
    });
  }

  #accept(request: Request, token: number, logprobs: TokenLogprobs | null): void {
    request.tokenRead();
    if (this.endTokens.has(token) && (request.constraint || !request.params.ignoreEos)) {
      request.endRead();
      this.#finish(request, "stop");
      return;
    }
    request.tokens.push(token);
    const goOn = this.#tell(request, token, logprobs);
    if (request.done) return;
    const last = request.tokens.length - request.prompt.length >= request.limit;
    if (!goOn) this.#finish(request, "stop");
    else if (request.constraint) void this.#follow(request, request.constraint, token, last);
    else if (last) this.#finish(request, "length");
  }

  /**
   * Holds a request until its constraint has told which tokens may follow. Meanwhile other requests continue,
   * or the device is idle.
   */
  async #follow(request: Request, constraint: Constraint, token: number, last: boolean): Promise<void> {
    request.allowed = null;
    try {
      const allowed = await constraint.accept(token);
      if (request.done) return;
      if (allowed && !last) request.allowed = allowed;
      else this.#finish(request, allowed ? "length" : "stop");
    } catch (error) {
      if (!request.done) this.fail(request, error);
    }
    this.engine.goOn();
  }

  /** Tells a token to the listener of its request. A listener that throws ends only its own request. */
  #tell(request: Request, token: number, logprobs: TokenLogprobs | null): boolean {
    try {
      return request.listener.token(token, logprobs);
    } catch (error) {
      this.fail(request, error);
      return false;
    }
  }

  /** Ends a request with an error. */
  fail(request: Request, error: unknown): void {
    this.engine.remove(request);
    request.listener.fail(error instanceof Error ? error : new Error(String(error)));
  }

  /** Ends a request. One whose prompt was read for what it shows keeps its pages. */
  #finish(request: Request, reason: "stop" | "length"): void {
    if (!request.idle) this.engine.remove(request);
    try {
      request.listener.finish(reason, request.stats());
    } catch (error) {
      this.fail(request, error);
    }
  }
}
