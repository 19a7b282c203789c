import {
  abortError,
  DeviceError,
  type ErrorRecord,
  fromErrorRecord,
  throwIfAborted,
  toErrorRecord,
} from "../both/errors.js";
import type {
  AnswerEvent,
  EngineStats,
  FromWorker,
  GenerateRequest,
  LoadProgress,
  LoadSettings,
  ModelCard,
  ProfileOptions,
  Prompt,
  StepProfile,
  ToWorker,
} from "../both/messages.js";
import type * as openai from "../both/openai.js";
import { modelUrl } from "../both/places.js";
import { Channel } from "./channel.js";
import { Completions } from "./completions.js";
import { hasLeft, noteLeft, watchLeaving } from "./left.js";
import { CHAT, textShape } from "./replies.js";
import { checkedMessages, prepareChat, prepareText } from "./requests.js";

export interface EngineOptions extends LoadSettings {
  /**
   * Called while the model is loading, and later of kernels that an answer waits for and of a GPU that is
   * opened anew.
   */
  readonly onProgress?: (progress: LoadProgress) => void;
  /** Called for what is worth knowing but stops nothing; console.warn by default. */
  readonly onWarning?: (message: string) => void;
  /** Ends the loading with an AbortError and frees everything. */
  readonly signal?: AbortSignal;
  /**
   * The engine's worker, for bundlers that need to make it themselves. It belongs to the engine from then on.
   */
  readonly worker?: () => WorkerPort;
}

/**
 * Loads the artifact at `url` (the folder that holds manifest.json, or "hf:OWNER/NAME[@REVISION][/FOLDER]" of
 * the Hugging Face Hub) into a worker.
 *
 * @throws ArtifactError, DeviceError, or an AbortError when `signal` says so.
 */
export async function createEngine(url: string | URL, options: EngineOptions = {}): Promise<Engine> {
  throwIfAborted(options.signal);
  const address = modelUrl(url);
  const worker = options.worker?.() ?? (await startWorker(options.signal));
  return openEngine(worker, address, options);
}

/** What of a Worker an engine uses. */
export interface WorkerPort {
  postMessage(message: ToWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: FromWorker }) => void): void;
  addEventListener(type: "error", listener: (event: { readonly message: string }) => void): void;
  terminate(): void;
}

/** Has `worker`, which belongs to the engine from then on, load the artifact at `url`. */
export async function openEngine(worker: WorkerPort, url: URL, options: EngineOptions): Promise<Engine> {
  const link = new WorkerLink(worker);
  try {
    return new Engine(link, await link.load(url, options));
  } catch (error) {
    await link.close();
    throw error;
  }
}

/**
 * The worker from its file, which is all that a strict Content-Security-Policy allows; where it does not
 * start, from a copy in the package: dev servers that prebundle dependencies (Vite 6 and 7) leave worker.js
 * behind.
 */
async function startWorker(signal: AbortSignal | undefined): Promise<Worker> {
  const worker = workerOfFile();
  if (await starts(worker, signal)) return worker;
  worker.terminate();
  const { workerSource } = await import("./worker-source.js");
  return workerOf(workerSource);
}

function workerOfFile(): Worker {
  try {
    // Bundlers look for this very expression.
    return new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "nearfar" });
  } catch (error) {
    if (!(error instanceof DOMException) || error.name !== "SecurityError") throw error;
  }
  // Browsers refuse workers of another origin, such as a CDN's, but let a worker of this page import from
  // there.
  const here = import.meta.url;
  return workerOf(`import ${JSON.stringify(new URL("./worker.js", here).href)};`);
}

function workerOf(code: string): Worker {
  const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  return new Worker(blob, { type: "module", name: "nearfar" });
}

/** Whether a worker says its first word before it fails. */
function starts(worker: Worker, signal: AbortSignal | undefined): Promise<boolean> {
  const settled = new AbortController();
  const once = { once: true, signal: settled.signal };
  const answer = new Promise<boolean>((resolve, reject) => {
    worker.addEventListener("message", () => resolve(true), once);
    worker.addEventListener("error", () => resolve(false), once);
    const onAbort = (): void => {
      worker.terminate();
      reject(abortError());
    };
    signal?.addEventListener("abort", onAbort, once);
  });
  return answer.finally(() => settled.abort());
}

/** A loaded model. */
export class Engine {
  readonly chat: {
    readonly completions: Completions<
      openai.ChatCompletionRequest,
      openai.ChatCompletionChunk,
      openai.ChatCompletion
    >;
  };
  readonly completions: Completions<openai.CompletionRequest, openai.CompletionChunk, openai.Completion>;
  readonly #link: WorkerLink;
  readonly #loaded: ModelCard;

  /** Made by {@link createEngine}. */
  constructor(link: WorkerLink, loaded: ModelCard) {
    this.#link = link;
    this.#loaded = loaded;
    const { name } = loaded;
    const chat = new Completions(
      link,
      name,
      "chatcmpl",
      () => CHAT,
      (request: openai.ChatCompletionRequest) => prepareChat(request, name),
    );
    this.chat = { completions: chat };
    this.completions = new Completions(link, name, "cmpl", textShape, (request) =>
      prepareText(request, name),
    );
  }

  /** The model; its context may get shorter where a lost GPU is opened anew. */
  get model(): ModelCard {
    return this.#link.card ?? this.#loaded;
  }

  /** What the engine holds and how fast its last answer was. After `dispose`: what was left. */
  stats(): Promise<EngineStats> {
    return this.#link.stats();
  }

  /**
   * What each launch of a step costs on this GPU, while the engine is idle; what its cache held is forgotten.
   *
   * @throws DeviceError where the browser does not tell (timestamp-query), RequestError while it answers.
   */
  profile(options: ProfileOptions = {}): Promise<StepProfile> {
    return this.#link.profile(options);
  }

  /** How many tokens a conversation has as the model's prompt. */
  async countTokens(messages: readonly openai.MessageParam[]): Promise<number> {
    return this.#link.count({ kind: "chat", messages: checkedMessages(messages), continueLast: false });
  }

  /** Ends all answers, frees every GPU buffer, ends the worker. */
  dispose(): Promise<void> {
    return this.#link.close();
  }
}

interface Waiter<T> {
  readonly resolve: (value: T) => void;
  readonly reject: (error: Error) => void;
}

/** How long a worker gets to say that its buffers are freed, before it is ended anyway. */
const DISPOSE_TIMEOUT_MS = 2000;

/** The page's end of the line to the worker. */
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

  constructor(private readonly worker: WorkerPort) {
    worker.addEventListener("message", ({ data }) => this.#receive(data));
    worker.addEventListener("error", ({ message }) =>
      this.#fail(`The engine's worker failed: ${message || "it did not start"}`),
    );
  }

  /** Resolves once the model is loaded. The caller closes the link when this rejects. */
  load(url: URL, options: EngineOptions): Promise<ModelCard> {
    const { signal, kvMemory, contextLength, program, backend, threads } = options;
    this.#options = options;
    const load = Math.random().toString(36).slice(2);
    const unwatch = watchLeaving(load);
    return new Promise((resolve, reject) => {
      const onAbort = (): void => {
        noteLeft(load);
        reject(abortError());
      };
      signal?.addEventListener("abort", onAbort, { once: true });
      this.#onLoad = (message) => {
        unwatch();
        signal?.removeEventListener("abort", onAbort);
        if (message.type === "loaded") {
          this.#card = message.card;
          resolve(message.card);
        } else reject(fromErrorRecord(message.error));
      };
      const settings = { kvMemory, contextLength, program, backend, threads };
      this.#post({ type: "load", url: url.href, settings, load });
    });
  }

  /** What is known of the model now; null before it is loaded. */
  get card(): ModelCard | null {
    return this.#card;
  }

  /** Starts a request; its events come through the channel. */
  generate(request: GenerateRequest): { readonly events: Channel<AnswerEvent>; readonly abort: () => void } {
    const id = this.#nextId++;
    const events = new Channel<AnswerEvent>();
    if (this.#failure) {
      events.put({ event: "error", error: this.#failure });
      return { events, abort: () => undefined };
    }
    this.#answers.set(id, events);
    this.#post({ type: "generate", id, request });
    const abort = (): void => {
      if (this.#answers.delete(id)) this.#post({ type: "abort", id });
    };
    return { events, abort };
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

  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    if (!this.#failure) {
      let timer: ReturnType<typeof setTimeout> | undefined;
      const freed = new Promise<void>((resolve) => {
        this.#onDisposed = resolve;
        timer = setTimeout(resolve, DISPOSE_TIMEOUT_MS);
      });
      this.#post({ type: "dispose" });
      await freed;
      // In Node it would keep the process alive.
      clearTimeout(timer);
    }
    this.#fail("The engine was disposed. Create a new one.");
    this.worker.terminate();
  }

  #receive(message: FromWorker): void {
    switch (message.type) {
      case "started":
        return;
      case "progress":
        this.#follow(message.progress);
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
        this.#statsWaiting.get(message.id)?.resolve(message.stats);
        this.#statsWaiting.delete(message.id);
        return;
      case "profiled":
        this.#profiled(message.id, message.profile);
        return;
      case "counted":
        this.#counted(message.id, message.tokens);
        return;
      case "disposed":
        this.#finalStats = message.stats;
        this.#onDisposed();
    }
  }

  /** A GPU that was opened anew may have less room. */
  #follow(progress: LoadProgress): void {
    if (progress.phase !== "reopened" || !this.#card) return;
    this.#card = { ...this.#card, contextLength: progress.contextLength };
  }

  #counted(id: number, tokens: number | ErrorRecord): void {
    const waiter = this.#countsWaiting.get(id);
    this.#countsWaiting.delete(id);
    if (typeof tokens === "number") waiter?.resolve(tokens);
    else waiter?.reject(fromErrorRecord(tokens));
  }

  #profiled(id: number, profile: StepProfile | ErrorRecord): void {
    const waiter = this.#profilesWaiting.get(id);
    this.#profilesWaiting.delete(id);
    if ("launches" in profile) waiter?.resolve(profile);
    else waiter?.reject(fromErrorRecord(profile));
  }

  #answer(id: number, answer: AnswerEvent): void {
    this.#answers.get(id)?.put(answer);
    if (answer.event === "end" || answer.event === "error") this.#answers.delete(id);
  }

  /** Whatever is still awaited will not come. */
  #fail(message: string): void {
    this.#failure ??= toErrorRecord(new DeviceError(message));
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

  #post(message: ToWorker): void {
    this.worker.postMessage(message);
  }
}
