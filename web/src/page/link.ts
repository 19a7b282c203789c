import {
  abortReason,
  DeviceError,
  disposedError,
  type ErrorRecord,
  fromErrorRecord,
  type NearfarError,
  RequestError,
  toErrorRecord,
} from "../protocol/errors.js";
import type {
  AnswerEvent,
  EmbeddingInputs,
  EngineStats,
  FromWorker,
  GenerateRequest,
  LoadSettings,
  ModelCard,
  ProfileOptions,
  Prompt,
  StepProfile,
  ToWorker,
} from "../protocol/messages.js";
import type { WorkerPort } from "../protocol/ports.js";
import { Pulse } from "../protocol/pulse.js";
import { Channel } from "./channel.js";
import { hasLeft, noteLeft, watchLeaving } from "./left.js";
import { Meter } from "./meter.js";
import type { EngineOptions } from "./options.js";

interface Waiter<T> {
  readonly resolve: (value: T) => void;
  readonly reject: (error: Error) => void;
}

/** Seconds that a worker may be silent while a reply is awaited. */
export const PATIENCE = 120;
/** Milliseconds that a worker gets to free its buffers, before it is terminated. */
const DISPOSE_TIMEOUT_MS = 2000;

/** The page's end of the connection to the worker. */
export class WorkerLink {
  readonly #answers = new Map<number, Channel<AnswerEvent>>();
  readonly #statsWaiting = new Map<number, Waiter<EngineStats>>();
  readonly #countsWaiting = new Map<number, Waiter<number>>();
  readonly #profilesWaiting = new Map<number, Waiter<StepProfile>>();
  #nextId = 1;
  #closed: Promise<void> | null = null;
  #failure: ErrorRecord | null = null;
  #finalStats: EngineStats | null = null;
  #onLoad: (message: Extract<FromWorker, { type: "loaded" | "failed" }>) => void = () => undefined;
  #onDisposed: () => void = () => undefined;
  #options: EngineOptions = {};
  #card: ModelCard | null = null;
  #loading = false;
  #hasDownloaded = false;
  #meter: Meter | null = null;
  #pulse: Pulse | null = null;
  #tellLost: (reason: NearfarError) => void = () => undefined;
  /** Settles when the worker has died, or has given up the device; never by `close`. */
  readonly lost = new Promise<NearfarError>((resolve) => {
    this.#tellLost = resolve;
  });

  constructor(private readonly worker: WorkerPort) {
    worker.addEventListener("message", ({ data }) => this.#receive(data));
    const onFailure = (why: string): void => this.#die(`The engine's worker failed: ${why}. ${this.#remedy}`);
    worker.addEventListener("error", ({ message }) => onFailure(message || "it did not start"));
    // Workers report a message that cannot be read; otherwise its reader would wait for ever. Other ports
    // need not report it.
    worker.addEventListener("messageerror" as "error", () => onFailure("one of its messages cannot be read"));
  }

  /** Advice for a worker that is gone. */
  get #remedy(): string {
    return `Load the model again${this.#card ? ": engine.reload()" : ""}.`;
  }

  /** Resolves once the model is loaded. The caller closes the link when this rejects. */
  load(url: URL, options: EngineOptions): Promise<ModelCard> {
    const {
      signal,
      kvMemory,
      kvBits,
      contextLength,
      program,
      backend,
      threads,
      integrity,
      patience = PATIENCE,
    } = options;
    this.#options = options;
    this.#pulse = new Pulse(patience, () => this.#isAwaited, {
      ask: () => this.#post({ type: "ping" }),
      silent: () => {
        this.#post({ type: "hangs" });
        this.#die(
          `The engine's worker has said nothing for ${patience} s: it hangs. ${this.#remedy} Where it ` +
            "only computes for so long at a time, give createEngine more patience.",
        );
        this.worker.terminate();
      },
    });
    const meter = new Meter();
    this.#meter = meter;
    const load = Math.random().toString(36).slice(2);
    const unwatch = watchLeaving(load);
    return new Promise((resolve, reject) => {
      const onAbort = (): void => {
        noteLeft(load);
        this.#loading = false;
        reject(abortReason(signal));
      };
      signal?.addEventListener("abort", onAbort, { once: true });
      this.#onLoad = (message) => {
        this.#loading = false;
        unwatch();
        signal?.removeEventListener("abort", onAbort);
        if (message.type === "loaded") {
          this.#card = message.card;
          meter.keep(url, message.card, this.#hasDownloaded);
          resolve(message.card);
        } else reject(fromErrorRecord(message.error));
      };
      const settings: LoadSettings = {
        kvMemory,
        kvBits,
        contextLength,
        program,
        backend,
        threads,
        integrity,
      };
      this.#loading = true;
      this.#post({ type: "load", url: url.href, settings, load });
    });
  }

  /** Whether weights came over the network. */
  get hasDownloaded(): boolean {
    return this.#hasDownloaded;
  }

  /** The model's present card; null before it is loaded. */
  get card(): ModelCard | null {
    return this.#card;
  }

  /** Starts a request; its events come through the channel. */
  generate(request: GenerateRequest): { readonly events: Channel<AnswerEvent>; readonly abort: () => void } {
    return this.#ask((id) => ({ type: "generate", id, request }));
  }

  #ask(message: (id: number) => ToWorker): {
    readonly events: Channel<AnswerEvent>;
    readonly abort: () => void;
  } {
    const id = this.#nextId++;
    const events = new Channel<AnswerEvent>();
    if (this.#failure) {
      events.put({ event: "error", error: this.#failure });
      return { events, abort: () => undefined };
    }
    this.#answers.set(id, events);
    try {
      this.#post(message(id));
    } catch (error) {
      this.#answers.delete(id);
      throw error;
    }
    const abort = (): void => {
      if (this.#answers.delete(id)) this.#post({ type: "abort", id });
    };
    return { events, abort };
  }

  /** Asks for embeddings. One event follows: "embedded" or "error". */
  embed(inputs: EmbeddingInputs): { readonly events: Channel<AnswerEvent>; readonly abort: () => void } {
    return this.#ask((id) => ({ type: "embed", id, inputs }));
  }

  stats(): Promise<EngineStats> {
    if (this.#finalStats) return Promise.resolve(this.#finalStats);
    if (this.#failure) return Promise.reject(fromErrorRecord(this.#failure));
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#statsWaiting.set(id, { resolve, reject });
      this.#post({ type: "stats", id });
    });
  }

  count(prompt: Prompt): Promise<number> {
    if (this.#failure) return Promise.reject(fromErrorRecord(this.#failure));
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#countsWaiting.set(id, { resolve, reject });
      this.#post({ type: "count", id, prompt });
    });
  }

  profile(options: ProfileOptions): Promise<StepProfile> {
    if (this.#failure) return Promise.reject(fromErrorRecord(this.#failure));
    const id = this.#nextId++;
    return new Promise((resolve, reject) => {
      this.#profilesWaiting.set(id, { resolve, reject });
      this.#post({ type: "profile", id, options });
    });
  }

  /** Ends the worker; pending and later requests fail with the last given `reason`. */
  close(reason: DeviceError = disposedError()): Promise<void> {
    if (this.#closed) this.#failure = toErrorRecord(reason);
    this.#closed ??= this.#close(reason);
    return this.#closed;
  }

  async #close(reason: DeviceError): Promise<void> {
    if (!this.#failure) {
      let timer: ReturnType<typeof setTimeout> | undefined;
      const freed = new Promise<void>((resolve) => {
        this.#onDisposed = resolve;
        timer = setTimeout(resolve, DISPOSE_TIMEOUT_MS);
      });
      this.#post({ type: "dispose" });
      await freed;
      // In Node the timer would keep the process alive.
      clearTimeout(timer);
    }
    this.#fail(reason);
    // In Deno, a process that ends while a worker is ending crashes the GPU's driver.
    await this.worker.terminate();
  }

  #receive(message: FromWorker): void {
    this.#pulse?.heard();
    switch (message.type) {
      case "started":
      case "pong":
        return;
      case "lost":
        this.#tellLost(fromErrorRecord(message.error) as NearfarError);
        return;
      case "card":
        this.#card = message.card;
        return;
      case "progress":
        if (message.progress.phase === "weights")
          this.#hasDownloaded = message.progress.loaded > message.progress.cached;
        if (this.#loading) this.#meter?.hear(message.progress);
        this.#options.onProgress?.(message.progress);
        return;
      case "warning":
        // biome-ignore lint/suspicious/noConsole: the caller left warnings to us
        (this.#options.onWarning ?? console.warn)(message.message);
        return;
      case "whether left":
        void hasLeft(message.load).then((left) => this.#post({ type: "left", load: message.load, left }));
        return;
      case "loaded":
      case "failed":
        this.#onLoad(message);
        return;
      case "answer":
        this.#answer(message.id, message.answer);
        return;
      case "stats":
        settle(this.#statsWaiting, message.id, message.stats);
        return;
      case "profiled":
        settle(this.#profilesWaiting, message.id, message.profile);
        return;
      case "counted":
        settle(this.#countsWaiting, message.id, message.tokens);
        return;
      case "disposed":
        this.#finalStats = message.stats;
        this.#onDisposed();
    }
  }

  #answer(id: number, answer: AnswerEvent): void {
    this.#answers.get(id)?.put(answer);
    if (answer.event === "end" || answer.event === "embedded" || answer.event === "error")
      this.#answers.delete(id);
  }

  get #isAwaited(): boolean {
    const waiting = [this.#answers, this.#statsWaiting, this.#countsWaiting, this.#profilesWaiting];
    return !this.#failure && (this.#loading || waiting.some(({ size }) => size > 0));
  }

  #die(message: string): void {
    const error = new DeviceError(message, { code: "worker-failed" });
    if (!this.#failure) this.#tellLost(error);
    this.#fail(error);
  }

  /** Fails everything that is still awaited. */
  #fail(reason: DeviceError): void {
    this.#failure ??= toErrorRecord(reason);
    this.#pulse?.end();
    const error = this.#failure;
    this.#onLoad({ type: "failed", error });
    for (const events of this.#answers.values()) events.put({ event: "error", error });
    this.#answers.clear();
    for (const waiting of [this.#statsWaiting, this.#countsWaiting, this.#profilesWaiting]) {
      for (const { reject } of waiting.values()) reject(fromErrorRecord(error));
      waiting.clear();
    }
    this.#onDisposed();
  }

  /** Sends a message. RequestError for one that cannot be sent, since such a value came from the caller. */
  #post(message: ToWorker): void {
    try {
      this.worker.postMessage(message);
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new RequestError(
        `A value of the ${message.type} cannot be sent to the engine's worker: ${reason}`,
        null,
        {
          cause,
        },
      );
    }
    if (message.type !== "ping") this.#pulse?.watch();
  }
}

/** Ends the wait for one answer. */
function settle<T extends object | number>(
  waiting: Map<number, Waiter<T>>,
  id: number,
  answer: T | ErrorRecord,
): void {
  const waiter = waiting.get(id);
  waiting.delete(id);
  if (typeof answer === "object" && "kind" in answer) waiter?.reject(fromErrorRecord(answer as ErrorRecord));
  else waiter?.resolve(answer as T);
}
