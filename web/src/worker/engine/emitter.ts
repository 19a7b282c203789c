import type { HostArray } from "./backend.js";
import { notFinite } from "./faults.js";
import { type Flight, logprobsOf } from "./launches.js";
import type { Constraint, Request, TokenLogprobs } from "./request.js";
import type { Step } from "./scheduler.js";

/** What a sampler writes instead of a token where no logit is finite. */
const NOT_FINITE = -1;

/** What the engine does where a step has been read. */
export interface Following {
  /** The request has ended. */
  readonly remove: (request: Request) => void;
  /** What the step computed may be relied on. */
  readonly read: (step: Step) => void;
  /** There may be something to do again. */
  readonly goOn: () => void;
}

/** The last part of a step: results of the device in, tokens and ends of requests out to their listeners. */
export class Emitter {
  constructor(
    private readonly endTokens: ReadonlySet<number>,
    private readonly engine: Following,
  ) {}

  /** Tells what a step has come to. `embedding`: the width of what it gives instead of tokens. */
  emit({ step, logprobs }: Flight, [sampled, ...scores]: HostArray[], embedding: number | undefined): void {
    if (embedding) {
      this.#embedded(step, sampled, embedding);
      return;
    }
    step.sampled.forEach((request, row) => {
      request.pending -= 1;
      // Before its pages are entered: what this step computed of it is worth nothing.
      if (!request.done && (sampled?.[row] ?? NOT_FINITE) < 0) this.fail(request, notFinite(request));
    });
    this.engine.read(step);
    step.sampled.forEach((request, row) => {
      if (request.done) return;
      const token = sampled?.[row] ?? NOT_FINITE;
      const wanted = logprobs ? request.params.logprobs : null;
      this.#accept(request, token, wanted === null ? null : logprobsOf(scores, row, wanted));
    });
  }

  /** Each request of a step gets its row, and has ended: it is the state of its last token. */
  #embedded(step: Step, rows: HostArray | undefined, width: number): void {
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

  /** Holds a request until its constraint has told what may follow; others go on, or the device is idle. */
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

  /** A listener that throws ends its own request alone. */
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

  #finish(request: Request, reason: "stop" | "length"): void {
    this.engine.remove(request);
    try {
      request.listener.finish(reason, request.stats());
    } catch (error) {
      this.fail(request, error);
    }
  }
}
