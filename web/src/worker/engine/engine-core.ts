import { DeviceError, RequestError } from "../../both/errors.js";
import { MAX_ROWS, MAX_STEP, TOP_LOGPROBS } from "../../both/format.js";
import type { FunctionName } from "../../both/manifest.js";
import { SequenceTable } from "../cache/sequence-table.js";
import type { Backend, HostArray, Read } from "./backend.js";
import { StepInputs } from "./inputs.js";
import { Request, type RequestListener, type TokenLogprobs } from "./request.js";
import { isPlainGreedy, type SamplingParams } from "./sampling.js";
import { type Bucket, Scheduler, type Step } from "./scheduler.js";

/**
 * Steps given to the device before the first of them has been read. One would leave it idle while the host
 * reads; each one more is a step wasted when an answer ends at an end token or a stop string.
 */
const STEPS_AHEAD = 3;

/** What a sampler writes instead of a token where no logit is finite. */
const NOT_FINITE = -1;

/** A function and its size. */
type Run = readonly [name: FunctionName, size: number];

interface Flight {
  readonly step: Step;
  readonly logprobs: boolean;
  readonly results: Promise<HostArray[]>;
}

/** Runs requests, several at once: schedule → step → sample → emit. */
export class EngineCore {
  readonly #table: SequenceTable;
  readonly #scheduler: Scheduler;
  readonly #inputs: StepInputs;
  readonly #endTokens: ReadonlySet<number>;
  #failure: Error | null = null;
  #running = false;

  constructor(
    private readonly backend: Backend,
    endTokens: readonly number[],
  ) {
    const { groups, pageSize, slots, contextLength } = backend.shape;
    const bucket = (size: number): Bucket => ({ size, logits: Math.min(size, MAX_ROWS) });
    this.#table = new SequenceTable(
      groups.map(({ pages }) => pages),
      pageSize,
      slots,
      groups.map(({ window }) => window),
    );
    this.#scheduler = new Scheduler(this.#table, backend.sizes("step").map(bucket), contextLength);
    this.#inputs = new StepInputs(backend);
    this.#endTokens = new Set(endTokens);
  }

  /** Tokens that new requests could put into the cache now, be it one or a full context in each slot. */
  get freeTokens(): number {
    const { contextLength, slots } = this.backend.shape;
    return this.#table.longest(MAX_STEP, contextLength * slots);
  }

  /** Queues a request. Throws RequestError where it can never run; everything later goes to the listener. */
  submit(prompt: readonly number[], params: SamplingParams, listener: RequestListener): Request {
    if (this.#failure) throw this.#failure;
    const { vocabSize } = this.backend.shape;
    const alien = prompt.find((token) => !Number.isInteger(token) || token < 0 || token >= vocabSize);
    if (alien !== undefined)
      throw new RequestError(
        `The prompt has token id ${alien}, outside the vocabulary of ${vocabSize} tokens.`,
        "prompt",
      );
    const limit = this.#scheduler.limitTokens(prompt.length, params.maxTokens);
    const request = new Request(prompt, params, limit, listener);
    this.#scheduler.add(request);
    void this.#run();
    return request;
  }

  /** Ends a request without a word to its listener. */
  cancel(request: Request): void {
    if (!request.done) this.#scheduler.remove(request);
  }

  /** Fails all requests and refuses new ones. */
  stop(error: Error): void {
    this.#failure ??= error;
    for (const request of this.#scheduler.requests()) {
      // A listener that is told may cancel others of these.
      if (request.done) continue;
      this.#scheduler.remove(request);
      request.listener.fail(this.#failure);
    }
  }

  /** Runs until there is nothing to do. */
  async #run(): Promise<void> {
    if (this.#running) return;
    this.#running = true;
    try {
      // Requests submitted together, as for n > 1, should meet in the first step.
      await Promise.resolve();
      const flights: Flight[] = [];
      for (;;) {
        const compiling = this.#fill(flights);
        if (compiling) {
          // And plan again: requests may have come and gone meanwhile.
          await compiling;
          continue;
        }
        const oldest = flights.shift();
        if (!oldest) break;
        this.#emit(oldest, await oldest.results);
      }
    } catch (error) {
      this.stop(deviceError(error));
    }
    // In the same turn as the last look for work, so that no request comes in between unseen.
    this.#running = false;
  }

  /**
   * Keeps the device busy. Returns what to wait for where the next step needs functions that are not ready
   * yet.
   */
  #fill(flights: Flight[]): Promise<void> | null {
    while (flights.length < STEPS_AHEAD) {
      const step = this.#scheduler.schedule(flights.at(-1)?.step ?? null);
      if (!step) return null;
      for (const [group, from, to] of step.copies) this.backend.copyPage(group, from, to);
      const runs = this.#runsOf(step);
      if (!runs.every(([name, size]) => this.backend.ready(name, size))) return this.#prepare(step, runs);
      flights.push(this.#launch(step, runs));
    }
    return null;
  }

  /** The functions of a step with their sizes, in order. */
  #runsOf({ bucket, sampled }: Step): Run[] {
    const runs: Run[] = [["step", bucket.size]];
    if (sampled.length === 0) return runs;
    const greedy = sampled.every(({ params }) => isPlainGreedy(params));
    const name = greedy ? "greedy" : "sample";
    runs.push([name, this.#sizeFor(name, sampled.length)]);
    const logprobs = sampled.some(({ params }) => params.logprobs !== null);
    if (logprobs) runs.push(["logprobs", this.#sizeFor("logprobs", sampled.length)]);
    return runs;
  }

  /** A function that the device cannot run fails the requests that need it. */
  async #prepare(step: Step, runs: readonly Run[]): Promise<void> {
    try {
      await Promise.all(runs.map(([name, size]) => this.backend.prepare(name, size)));
    } catch (error) {
      const named = deviceError(error);
      for (const chunk of step.chunks) if (chunk && !chunk.request.done) this.#fail(chunk.request, named);
    }
  }

  #launch(step: Step, runs: readonly Run[]): Flight {
    const { backend } = this;
    this.#inputs.writeStep(step);
    const sampler = runs[1];
    if (sampler) this.#inputs.writeSampling(step, sampler[1], sampler[0] === "greedy");
    for (const [name, size] of runs) backend.run(name, size);
    this.#scheduler.launched(step);
    const logprobs = runs.length > 2;
    // A step that samples nothing is read too: that bounds how many prefill steps are queued.
    const results = backend.fetch(readsOf(Math.max(step.sampled.length, 1), logprobs));
    // Awaited in order; if an earlier one fails, this one's failure is no news.
    results.catch(() => undefined);
    return { step, logprobs, results };
  }

  #sizeFor(name: "greedy" | "sample" | "logprobs", rows: number): number {
    const size = this.backend.sizes(name).find((candidate) => candidate >= rows);
    if (size === undefined) throw new Error(`the artifact has no plan of ${name} for ${rows} rows`);
    return size;
  }

  #emit({ step, logprobs }: Flight, [sampled, ...scores]: HostArray[]): void {
    step.sampled.forEach((request, row) => {
      request.pending -= 1;
      // Before its pages are entered: what this step computed of it is worth nothing.
      if (!request.done && (sampled?.[row] ?? NOT_FINITE) < 0) this.#fail(request, notFinite(request));
    });
    this.#scheduler.read(step);
    step.sampled.forEach((request, row) => {
      if (request.done) return;
      const token = sampled?.[row] ?? NOT_FINITE;
      const wanted = logprobs ? request.params.logprobs : null;
      this.#accept(request, token, wanted === null ? null : logprobsOf(scores, row, wanted));
    });
  }

  #accept(request: Request, token: number, logprobs: TokenLogprobs | null): void {
    request.tokenRead();
    if (this.#endTokens.has(token) && !request.params.ignoreEos) {
      this.#finish(request, "stop");
      return;
    }
    request.tokens.push(token);
    const goOn = this.#tell(request, token, logprobs);
    if (request.done) return;
    if (!goOn) this.#finish(request, "stop");
    else if (request.tokens.length - request.prompt.length >= request.limit) this.#finish(request, "length");
  }

  /** A listener that throws ends its own request alone. */
  #tell(request: Request, token: number, logprobs: TokenLogprobs | null): boolean {
    try {
      return request.listener.token(token, logprobs);
    } catch (error) {
      this.#fail(request, error);
      return false;
    }
  }

  #fail(request: Request, error: unknown): void {
    this.#scheduler.remove(request);
    request.listener.fail(error instanceof Error ? error : new Error(String(error)));
  }

  #finish(request: Request, reason: "stop" | "length"): void {
    this.#scheduler.remove(request);
    try {
      request.listener.finish(reason, request.stats());
    } catch (error) {
      this.#fail(request, error);
    }
  }
}

/** By name, whatever the driver threw: after it nothing on the device can be relied on. */
function deviceError(cause: unknown): DeviceError {
  if (cause instanceof DeviceError) return cause;
  const message = cause instanceof Error ? cause.message : String(cause);
  return new DeviceError(`A step failed on the device: ${message}. Load the model again.`, { cause });
}

function notFinite({ tokens, prompt }: Request): DeviceError {
  return new DeviceError(
    `The model's logits were not finite (NaN or infinite) after ${tokens.length - prompt.length} tokens of ` +
      "the answer. Ask again. Where it comes back, the model's values are too large for this device's " +
      "kernels, or the artifact is damaged: download or build it again, or use another model.",
  );
}

function readsOf(rows: number, logprobs: boolean): Read[] {
  const sampled: Read = { buffer: "sampled", count: rows };
  if (!logprobs) return [sampled];
  return [
    sampled,
    { buffer: "logprob", count: rows },
    { buffer: "top_ids", count: rows * TOP_LOGPROBS },
    { buffer: "top_logprobs", count: rows * TOP_LOGPROBS },
  ];
}

function logprobsOf([logprob, ids, values]: HostArray[], row: number, count: number): TokenLogprobs {
  const top = Array.from({ length: count }, (_, i) => {
    const at = row * TOP_LOGPROBS + i;
    return { token: ids?.[at] ?? 0, logprob: values?.[at] ?? 0 };
  });
  return { logprob: logprob?.[row] ?? 0, top };
}
