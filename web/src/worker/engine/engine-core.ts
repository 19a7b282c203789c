import type { FunctionName } from "../../artifact/manifest.js";
import { MAX_ROWS, MAX_STEP } from "../../format/constants.js";
import { type DeviceError, DeviceLostError, OutOfMemoryError, RequestError } from "../../protocol/errors.js";
import { SequenceTable } from "../cache/sequence-table.js";
import type { Backend } from "./backend.js";
import { Emitter } from "./emitter.js";
import { deviceError, NoRoom, tooLong } from "./faults.js";
import { type Flight, Launches, type Run } from "./launches.js";
import { Reading } from "./reading.js";
import { type Constraint, Request, type RequestListener, type Scored } from "./request.js";
import type { SamplingParams } from "./sampling.js";
import { type Bucket, type ScheduledStep, Scheduler } from "./scheduler.js";

/**
 * Steps given to the device before the first of them has been read. With only one, the device would be idle
 * while the host reads; each further step is wasted when an answer ends at an end token or a stop string.
 */
const STEPS_AHEAD = 3;

/** How often in a row, without a token in between, a lost device is reopened. */
export const MOST_LOSSES = 3;

export interface EngineHooks {
  /**
   * Opens another backend like the failed one, and disposes of the failed one. Without this function the
   * engine ends when a step fails.
   */
  readonly reopen?: () => Promise<Backend>;
  readonly onWarning?: (message: string) => void;
  /** The backend was lost and no other one could be opened; the next request tries again. */
  readonly onLost?: (error: DeviceError) => void;
  /**
   * The most tokens of a context that the model allows where memory suffices; by default the backend's
   * context length.
   */
  readonly modelContext?: number;
  /**
   * Progress (compiled, total) of kernels for which requests wait. Both numbers are equal once no request
   * waits.
   */
  readonly onCompiling?: (compiled: number, total: number) => void;
  /**
   * Progress (read, total tokens) of prompts that take more than one step. Both numbers are equal once no
   * prompt is being read.
   */
  readonly onReading?: (read: number, total: number) => void;
}

/**
 * Runs several requests at once: schedule → step → sample → emit.
 *
 * A failed step makes everything that the device held invalid. If the device was lost, or had no memory for
 * the step, the requests are computed again from their tokens: on a reopened device, and after a lack of
 * memory with smaller steps. After any other error they fail, and the next request reopens the device.
 */
export class EngineCore {
  #backend: Backend;
  #table: SequenceTable;
  #scheduler: Scheduler;
  #launches: Launches;
  readonly #emitter: Emitter;
  #failure: Error | null = null;
  #running = false;
  /** A step has failed, so the backend has to be replaced. */
  #broken = false;
  #lostInARow = 0;
  /** The number of kernels for which requests wait, including kernels added since. */
  #awaited = 0;
  readonly #reading: Reading;

  constructor(
    backend: Backend,
    endTokens: readonly number[],
    private readonly hooks: EngineHooks = {},
  ) {
    this.#backend = backend;
    [this.#table, this.#scheduler] = partsFor(backend, hooks.modelContext);
    this.#launches = new Launches(backend);
    this.#reading = new Reading(hooks.onReading);
    this.#emitter = new Emitter(new Set(endTokens), {
      remove: (request) => this.#scheduler.remove(request),
      read: (step) => {
        this.#scheduler.read(step);
        this.#reading.after(this.#scheduler.requests());
      },
      goOn: () => void this.#run(),
    });
  }

  /** The number of rows of the largest step. It is less than the artifact's if memory did not suffice. */
  get largestStep(): number {
    return this.#scheduler.largest;
  }

  /**
   * The number of tokens that new requests could put into the cache now, as one context or as one in each
   * slot. Requests that only hold their pages make room for others.
   */
  get freeTokens(): number {
    const { contextLength, slots } = this.#backend.shape;
    return this.#table.longest(MAX_STEP, contextLength * slots, this.#scheduler.idle);
  }

  /**
   * Queues a request. Throws RequestError if the request can never run; the listener hears of later errors.
   */
  submit(
    prompt: readonly number[],
    params: SamplingParams,
    listener: RequestListener,
    constraint: Constraint | null = null,
    scored: Scored | null = null,
  ): Request {
    if (this.#failure) throw this.#failure;
    const { vocabSize } = this.#backend.shape;
    const alien = prompt.find((token) => !Number.isInteger(token) || token < 0 || token >= vocabSize);
    if (alien !== undefined)
      throw new RequestError(
        `The prompt has token id ${alien}, outside the vocabulary of ${vocabSize} tokens.`,
        "prompt",
      );
    const limit = this.#scheduler.limitTokens(prompt.length, params.maxTokens);
    const request = new Request(prompt, params, limit, listener, constraint, scored);
    this.#scheduler.add(request);
    void this.#run();
    return request;
  }

  /** Ends a request without notifying its listener. */
  cancel(request: Request): void {
    if (!request.done) this.#scheduler.remove(request);
  }

  /** Fails all requests and rejects new ones. */
  stop(error: Error): void {
    this.#failure ??= error;
    this.#failAll(this.#failure);
  }

  /**
   * Uses the device between answers; afterwards its buffers hold nothing of any request. `check` runs first,
   * and if it throws, nothing is lost. Throws RequestError while requests run; new requests wait until `use`
   * has ended.
   */
  async alone<P, T>(check: () => P, use: (checked: P) => Promise<T>): Promise<T> {
    if (this.#failure) throw this.#failure;
    if (this.#running || this.#scheduler.requests().some(({ idle }) => !idle))
      throw new RequestError("The engine is answering. Ask for its profile when it is idle.");
    this.#running = true;
    try {
      if (this.#broken) await this.#reopen();
      return await this.#lend(use, check());
    } finally {
      this.#running = false;
      void this.#run();
    }
  }

  async #lend<P, T>(use: (checked: P) => Promise<T>, checked: P): Promise<T> {
    try {
      return await use(checked);
    } catch (error) {
      this.#broken ||= error instanceof DeviceLostError || error instanceof OutOfMemoryError;
      throw error;
    } finally {
      this.#begin(this.#backend);
    }
  }

  #failAll(error: Error): void {
    for (const request of this.#scheduler.requests()) {
      // An earlier listener of this loop may have cancelled the request.
      if (request.done) continue;
      this.#scheduler.remove(request);
      request.listener.fail(error);
    }
  }

  /** Runs until no work is left. */
  async #run(): Promise<void> {
    if (this.#running) return;
    this.#running = true;
    // Requests that are submitted together, as for n > 1, should meet in the first step.
    await Promise.resolve();
    for (;;) {
      try {
        if (this.#broken) await this.#reopen();
        await this.#steps();
        return;
      } catch (error) {
        this.#recover(deviceError(error));
        if (!this.#running) return;
      }
    }
  }

  /** Runs steps until no work is left. */
  async #steps(): Promise<void> {
    const flights: Flight[] = [];
    for (;;) {
      const unready = this.#fill(flights);
      const oldest = flights.shift();
      if (oldest) {
        try {
          this.#emitter.emit(oldest, await oldest.results, this.#backend.shape.embedding);
        } catch (error) {
          if (!(error instanceof OutOfMemoryError)) throw error;
          // Any step in flight may have used up the memory, so the largest one that can be made smaller
          // counts.
          throw new NoRoom(Math.max(...[oldest, ...flights].map(({ step }) => step.bucket.size)), error);
        }
        this.#lostInARow = 0;
      } else if (unready) {
        // The next step is planned again, because requests may have come and gone meanwhile.
        await this.#prepare(...unready);
      } else {
        this.#endCompiling();
        this.#reading.end();
        // `#running` changes in the same turn as the last check for work, so that no request is missed.
        this.#running = false;
        return;
      }
    }
  }

  /** Decides what happens to the requests after a failed step. */
  #recover(error: DeviceError | NoRoom): void {
    this.#endCompiling();
    this.#reading.end();
    const unopened = this.#broken;
    this.#broken = true;
    const cause = error instanceof NoRoom ? error.reason : error;
    if (this.hooks.reopen && this.#goesOn(error)) return;
    if (!this.#failure && (unopened || cause instanceof DeviceLostError)) this.hooks.onLost?.(cause);
    if (this.hooks.reopen) this.#failAll(cause);
    else this.stop(cause);
    this.#lostInARow = 0;
    // A listener may have submitted a new request.
    this.#running = this.#failure === null && this.#scheduler.requests().length > 0;
  }

  /** Whether the requests continue after the device is reopened. */
  #goesOn(error: DeviceError | NoRoom): boolean {
    if (this.#failure) return false;
    if (error instanceof NoRoom) {
      for (const request of this.#scheduler.requests()) request.restart();
      return this.#shrink(error.size, error.reason);
    }
    if (!(error instanceof DeviceLostError)) return false;
    this.#lostInARow += 1;
    return this.#lostInARow <= MOST_LOSSES;
  }

  /** Stops using steps of `size` rows or more, if there are smaller ones. */
  #shrink(size: number, { message }: Error): boolean {
    if (!this.#scheduler.shrink(size)) return false;
    this.hooks.onWarning?.(
      `There was no memory for steps of ${size} rows. From now on this engine takes steps of at most ` +
        `${this.#scheduler.largest} rows, so that prompts take longer. Close other tabs, or load the model ` +
        `with less kvMemory. (${message})`,
    );
    return true;
  }

  async #reopen(): Promise<void> {
    if (!this.hooks.reopen) return;
    const backend = await this.hooks.reopen();
    if (this.#failure) {
      backend.dispose();
      throw this.#failure;
    }
    this.#broken = false;
    this.#begin(backend);
  }

  /** Starts afresh on a backend: requests are computed again from their tokens, but those that are idle. */
  #begin(backend: Backend): void {
    const before = this.#scheduler;
    const { contextLength } = this.#backend.shape;
    if (backend === this.#backend) this.#launches.forget();
    else this.#launches = new Launches(backend);
    this.#backend = backend;
    [this.#table, this.#scheduler] = partsFor(backend, this.hooks.modelContext);
    this.#scheduler.shrink(before.largest + 1);
    for (const request of before.requests()) {
      request.restart();
      if (!request.idle) this.#scheduler.add(request);
    }
    if (backend.shape.contextLength < contextLength) this.#shorten(contextLength);
  }

  /** Adapts to less room than before: requests that do not fit end, others get a lower limit. */
  #shorten(before: number): void {
    const { contextLength } = this.#backend.shape;
    this.hooks.onWarning?.(
      `The device was reopened and has less room: from now on the context is ${contextLength} ` +
        `tokens instead of ${before}. Close other tabs and load the model again for more.`,
    );
    for (const request of this.#scheduler.requests()) {
      // An earlier listener of this loop may have cancelled the request.
      if (request.done || request.shorten(contextLength)) continue;
      this.#emitter.fail(request, tooLong(request, contextLength, before));
    }
  }

  /**
   * Keeps the device busy. If functions of the next step are not ready, returns the step and these functions,
   * whose kernels are being compiled.
   */
  #fill(flights: Flight[]): [ScheduledStep, Run[]] | null {
    const ahead = this.#backend.pipelined === false ? 1 : STEPS_AHEAD;
    while (flights.length < ahead) {
      const step = this.#scheduler.schedule(flights.at(-1)?.step ?? null);
      if (!step) return null;
      for (const [group, from, to] of step.copies) this.#backend.copyPage(group, from, to);
      const runs = this.#launches.runsOf(step);
      const unready = this.#launches.unready(runs);
      if (unready.length > 0) {
        if (flights.length > 0)
          for (const [name, size] of unready) this.#backend.prepare(name, size).catch(() => undefined);
        return [step, unready];
      }
      this.#endCompiling();
      flights.push(this.#launches.launch(step, runs));
      this.#scheduler.launched(step);
    }
    return null;
  }

  /**
   * Waits for one kernel of a step only, since the next plan may differ. If the device cannot run a function,
   * the requests that need it fail.
   */
  async #prepare(step: ScheduledStep, runs: Run[]): Promise<void> {
    const missing = this.#launches.missing(runs);
    this.#awaited = Math.max(this.#awaited, missing);
    this.hooks.onCompiling?.(this.#awaited - missing, this.#awaited);
    let refused: FunctionName = "step";
    try {
      await this.#launches.prepareOne(runs, (name) => {
        refused = name;
      });
    } catch (error) {
      const named = deviceError(error);
      if (named instanceof DeviceLostError) throw named;
      if (named instanceof OutOfMemoryError && this.#shrink(step.bucket.size, named)) return;
      const requests = step.chunks.flatMap((chunk) => (chunk && !chunk.request.done ? chunk.request : []));
      const needy = requests.filter((request) => this.#launches.needs(request, refused));
      // The requests fail, because otherwise they would request the same kernel for ever.
      for (const request of needy.length > 0 ? needy : requests) this.#emitter.fail(request, named);
    }
  }

  /** Reports that no request waits for kernels any more. */
  #endCompiling(): void {
    if (this.#awaited > 0) this.hooks.onCompiling?.(this.#awaited, this.#awaited);
    this.#awaited = 0;
  }
}

/** What the engine keeps about a backend's cache. */
function partsFor(backend: Backend, modelContext: number | undefined): [SequenceTable, Scheduler] {
  const { groups, pageSize, slots, contextLength } = backend.shape;
  const bucket = (size: number): Bucket => ({ size, logits: Math.min(size, MAX_ROWS) });
  const table = new SequenceTable(
    groups.map(({ pages }) => pages),
    pageSize,
    slots,
    groups.map(({ window }) => window),
    groups.map(({ stride }) => stride ?? null),
  );
  const scheduler = new Scheduler(table, backend.sizes("step").map(bucket), contextLength, modelContext);
  return [table, scheduler];
}
