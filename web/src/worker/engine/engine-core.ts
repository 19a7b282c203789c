import type { FunctionName } from "../../artifact/manifest.js";
import { MAX_ROWS, MAX_STEP } from "../../format/constants.js";
import { type DeviceError, DeviceLostError, OutOfMemoryError, RequestError } from "../../protocol/errors.js";
import { SequenceTable } from "../cache/sequence-table.js";
import type { Backend } from "./backend.js";
import { Emitter } from "./emitter.js";
import { deviceError, NoRoom, tooLong } from "./faults.js";
import { type Flight, Launches, type Run } from "./launches.js";
import { Reading } from "./reading.js";
import { type Constraint, Request, type RequestListener } from "./request.js";
import type { SamplingParams } from "./sampling.js";
import { type Bucket, Scheduler, type Step } from "./scheduler.js";

/**
 * Steps given to the device before the first of them has been read. One would leave it idle while the host
 * reads; each one more is a step wasted when an answer ends at an end token or a stop string.
 */
const STEPS_AHEAD = 3;

/** How often in a row, without a token between, a lost device is opened anew. */
export const MOST_LOSSES = 3;

export interface EngineHooks {
  /**
   * Opens another backend like the failed one, which it disposes of. Without it the engine ends when a step
   * fails.
   */
  readonly reopen?: () => Promise<Backend>;
  readonly onWarning?: (message: string) => void;
  /** The backend was lost and no other could be opened; the next request tries again. */
  readonly onLost?: (error: DeviceError) => void;
  /** Tokens that the model allows where memory suffices; by default the backend's context. */
  readonly modelContext?: number;
  /**
   * Progress (compiled, total) of kernels that waiting requests need. Both are equal when no request waits
   * any more.
   */
  readonly onCompiling?: (compiled: number, total: number) => void;
  /**
   * Progress (read, total tokens) of prompts that take more than a step. Both are equal when no prompt is
   * read any more.
   */
  readonly onReading?: (read: number, total: number) => void;
}

/**
 * Runs requests, several at once: schedule → step → sample → emit.
 *
 * A failed step voids everything that the device held. Where the device was lost, or had no memory for the
 * step, requests are computed again from their tokens, on a reopened device and then with smaller steps; else
 * they fail, and the next request reopens the device.
 */
export class EngineCore {
  #backend: Backend;
  #table: SequenceTable;
  #scheduler: Scheduler;
  #launches: Launches;
  readonly #emitter: Emitter;
  #failure: Error | null = null;
  #running = false;
  /** A step has failed, so the backend can only be replaced. */
  #broken = false;
  #lostInARow = 0;
  /** Kernels that requests wait for, including those added since. */
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
        this.#reading.after(step, this.#scheduler.requests());
      },
      goOn: () => void this.#run(),
    });
  }

  /** Rows of the largest step; fewer than the artifact has where memory did not suffice. */
  get largestStep(): number {
    return this.#scheduler.largest;
  }

  /** Tokens that new requests could put into the cache now, as one context or one in each slot. */
  get freeTokens(): number {
    const { contextLength, slots } = this.#backend.shape;
    return this.#table.longest(MAX_STEP, contextLength * slots);
  }

  /** Queues a request. Throws RequestError where it can never run; everything later goes to the listener. */
  submit(
    prompt: readonly number[],
    params: SamplingParams,
    listener: RequestListener,
    constraint: Constraint | null = null,
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
    const request = new Request(prompt, params, limit, listener, constraint);
    this.#scheduler.add(request);
    void this.#run();
    return request;
  }

  /** Ends a request without notifying its listener. */
  cancel(request: Request): void {
    if (!request.done) this.#scheduler.remove(request);
  }

  /** Fails all requests and refuses new ones. */
  stop(error: Error): void {
    this.#failure ??= error;
    this.#failAll(this.#failure);
  }

  /**
   * Uses the device between answers; afterwards its buffers hold nothing of requests. `check` runs first, and
   * if it throws nothing is lost. RequestError while there are requests; new ones wait meanwhile.
   */
  async alone<P, T>(check: () => P, use: (checked: P) => Promise<T>): Promise<T> {
    if (this.#failure) throw this.#failure;
    if (this.#running || this.#scheduler.requests().length > 0)
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
      // A notified listener may cancel others of these.
      if (request.done) continue;
      this.#scheduler.remove(request);
      request.listener.fail(error);
    }
  }

  /** Runs until there is nothing to do. */
  async #run(): Promise<void> {
    if (this.#running) return;
    this.#running = true;
    // Requests submitted together, as for n > 1, should meet in the first step.
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

  /** Steps until there is nothing to do. */
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
          // Any step in flight may have used up the memory; take the largest, if it can be made smaller.
          throw new NoRoom(Math.max(...[oldest, ...flights].map(({ step }) => step.bucket.size)), error);
        }
        this.#lostInARow = 0;
      } else if (unready) {
        // Plan again: requests may have come and gone meanwhile.
        await this.#prepare(...unready);
      } else {
        this.#endCompiling();
        this.#reading.end();
        // In the same turn as the last check for work, so that no request is missed.
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

  /** Whether the requests continue once the device is reopened. */
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

  /** Stops using steps of `size` rows, where there are smaller ones. */
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

  /** Starts afresh on a backend: requests are computed from their tokens. */
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
      this.#scheduler.add(request);
    }
    if (backend.shape.contextLength < contextLength) this.#shorten(contextLength);
  }

  /** Adapts to less room than before: requests that do not fit end, others get a lower limit. */
  #shorten(before: number): void {
    const { contextLength } = this.#backend.shape;
    this.hooks.onWarning?.(
      `The device was opened anew and has less room: from now on the context is ${contextLength} ` +
        `tokens instead of ${before}. Close other tabs and load the model again for more.`,
    );
    for (const request of this.#scheduler.requests()) {
      // A notified listener may cancel others of these.
      if (request.done || request.shorten(contextLength)) continue;
      this.#emitter.fail(request, tooLong(request, contextLength, before));
    }
  }

  /**
   * Keeps the device busy. Returns the next step if functions of it are not ready yet, with those functions;
   * their kernels are being compiled.
   */
  #fill(flights: Flight[]): [Step, Run[]] | null {
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
   * Waits for one kernel of a step only, since the next plan may differ. A function that the device cannot
   * run fails the requests that need it.
   */
  async #prepare(step: Step, runs: Run[]): Promise<void> {
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
      // Otherwise these would request the same kernel again for ever.
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
