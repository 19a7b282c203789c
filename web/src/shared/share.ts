import {
  DeviceError,
  disposedError,
  type ErrorRecord,
  RequestError,
  toErrorRecord,
} from "../protocol/errors.js";
import type {
  FromWorker,
  LoadProgress,
  LoadSettings,
  ModelCard,
  Question,
  ToWorker,
} from "../protocol/messages.js";
import type { WorkerPort } from "../protocol/ports.js";
import { refusalOf } from "../protocol/refusal.js";

/** One end of a channel, whose other end a page has. */
export interface SharePort {
  postMessage(message: FromWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: ToWorker }) => void): void;
  /** Starts a MessagePort, which waits for this call. */
  start?(): void;
}

interface Client {
  readonly port: SharePort;
  /** Whether the page waits for the model, or has it. */
  joined: boolean;
}

/** The page that sent a request, and the page's own number of the request. */
interface Asker {
  readonly client: Client;
  readonly question: Question;
}

type Load = Extract<ToWorker, { readonly type: "load" }>;

/** A worker and what it loads, or has loaded. */
interface Running {
  readonly worker: WorkerPort;
  readonly url: string;
  readonly settings: string;
  card: ModelCard | null;
  progress: LoadProgress | null;
  /** Whether the worker's device is lost for good: the next load starts a new worker. */
  lost: boolean;
  /** Why the worker is gone: every request is rejected with this error. */
  failure: ErrorRecord | null;
  /** Whether the worker has sent a message since it was last doubted; null if it is not doubted. */
  heard: boolean | null;
  /** Loads that wait until it is known whether the worker lives. */
  readonly loads: (() => void)[];
  /** Terminates the worker if it does not confirm that all is freed. */
  ending: ReturnType<typeof setTimeout> | undefined;
}

/** Milliseconds that a worker gets to free its buffers, before it is terminated. */
const DISPOSE_TIMEOUT_MS = 2000;
/** Milliseconds that a worker which seems to hang gets to send a message. */
const LAST_WORD_MS = 5000;

/** Lets several pages use one engine: each page sees the worker as its own. */
export class Share {
  readonly #clients = new Set<Client>();
  readonly #askers = new Map<number, Asker>();
  #running: Running | null = null;
  #nextId = 1;

  /** `onIdle`: no page has the engine any more, or waits for it. */
  constructor(
    private readonly start: () => WorkerPort,
    private readonly onIdle: () => void = () => undefined,
  ) {}

  /** Lets a page join; returns a function that removes it, for pages that cannot say so themselves. */
  connect(port: SharePort): () => void {
    const client: Client = { port, joined: false };
    this.#clients.add(client);
    port.addEventListener("message", ({ data }) => this.#fromPage(client, data));
    port.start?.();
    port.postMessage({ type: "started" });
    return () => this.#leave(client);
  }

  get isIdle(): boolean {
    return ![...this.#clients].some(({ joined }) => joined);
  }

  #fromPage(client: Client, message: ToWorker): void {
    const { port } = client;
    switch (message.type) {
      case "load":
        this.#load(client, message);
        return;
      case "ping":
        // The message goes to the worker, because the question is whether the worker lives, not whether this
        // thread does.
        if (this.#running && !this.#running.failure) this.#running.worker.postMessage(message);
        else port.postMessage({ type: "pong" });
        return;
      case "left":
        this.#running?.worker.postMessage(message);
        return;
      case "dispose":
        this.#leave(client);
        return;
      case "hangs":
        this.#doubt();
        return;
      case "abort":
        for (const [id, asker] of this.#askers)
          if (asker.client === client && asker.question.id === message.id) this.#abort(id);
        return;
      default: {
        // A page that has not loaded this model must not be answered by it: after a loss another page may have
        // loaded another one.
        const own = client.joined || this.#running?.failure ? this.#running : null;
        const failure = own ? own.failure : toErrorRecord(disposedError());
        if (failure) {
          port.postMessage(refusalOf(message, failure));
          return;
        }
        const id = this.#nextId++;
        this.#askers.set(id, { client, question: message });
        this.#running?.worker.postMessage({ ...message, id });
      }
    }
  }

  #load(client: Client, message: Load): void {
    if (!this.#clients.has(client)) return; // the page has left while it waited
    const settings = JSON.stringify(message.settings satisfies LoadSettings);
    const last = this.#running;
    if (last?.heard === false) {
      last.loads.push(() => this.#load(client, message));
      return;
    }
    if (last?.lost) {
      this.end();
      // Pages that had another model do not have this one.
      if (last.url !== message.url || last.settings !== settings)
        for (const other of this.#clients) other.joined = false;
    }
    const running = this.#running;
    if (!running) {
      this.#begin(message, settings);
      client.joined = true;
      return;
    }
    if (running.url !== message.url || running.settings !== settings) {
      const error = new RequestError(
        `This engine is shared, and has ${running.url} with settings ${running.settings}, not ` +
          `${message.url} with ${settings}. Ask for the same, or share another engine.`,
        "url",
      );
      client.port.postMessage({ type: "failed", error: toErrorRecord(error) });
      return;
    }
    client.joined = true;
    if (running.card) {
      client.port.postMessage({ type: "progress", progress: { phase: "ready", fraction: 1 } });
      client.port.postMessage({ type: "loaded", card: running.card });
    } else if (running.progress) client.port.postMessage({ type: "progress", progress: running.progress });
  }

  #begin(message: Load, settings: string): void {
    const worker = this.start();
    const running: Running = {
      ...{ worker, url: message.url, settings, card: null, progress: null },
      ...{ lost: false, failure: null, heard: null, loads: [], ending: undefined },
    };
    this.#running = running;
    worker.addEventListener("message", ({ data }) => this.#fromWorker(running, data));
    worker.addEventListener("error", ({ message: why }) => this.#died(running, why || "it did not start"));
    worker.addEventListener("messageerror" as "error", () =>
      this.#died(running, "one of its messages cannot be read"),
    );
    worker.postMessage(message);
  }

  #fromWorker(running: Running, message: FromWorker): void {
    if (message.type === "disposed") {
      clearTimeout(running.ending);
      running.worker.terminate();
    }
    if (this.#running !== running) return;
    if (running.heard === false) this.#trust(running);
    switch (message.type) {
      case "started":
      case "disposed":
        return;
      case "whether left":
        // Every page is asked, because the first one may be closed.
        this.#tellAll(message);
        return;
      case "loaded":
      case "card":
        running.card = message.card;
        this.#tellAll(message);
        return;
      case "progress":
        running.progress = message.progress;
        this.#tellAll(message);
        return;
      case "failed":
        this.end();
        this.#tellAll(message);
        for (const client of this.#clients) client.joined = false;
        this.onIdle();
        return;
      case "lost":
        running.lost = true;
        this.#tellAll(message);
        return;
      case "pong":
      case "warning":
        this.#tellAll(message);
        return;
      default: {
        const asker = this.#askers.get(message.id);
        const isDone =
          message.type !== "answer" || ["end", "embedded", "error"].includes(message.answer.event);
        if (isDone) this.#askers.delete(message.id);
        asker?.client.port.postMessage({ ...message, id: asker.question.id });
      }
    }
  }

  #tellAll(message: FromWorker): void {
    for (const { port, joined } of this.#clients) if (joined) port.postMessage(message);
  }

  /** Removes a page. The model is freed with the last page that has it. */
  #leave(client: Client): void {
    if (!this.#clients.delete(client)) return;
    for (const [id, asker] of this.#askers) if (asker.client === client) this.#abort(id);
    client.port.postMessage({ type: "disposed", stats: null });
    if (!this.isIdle) return;
    this.end();
    this.onIdle();
  }

  /** Handles a page's report that the worker hangs; the page may just have too little patience. */
  #doubt(): void {
    const running = this.#running;
    if (!running || running.failure || running.heard !== null) return;
    running.heard = false;
    running.worker.postMessage({ type: "ping" });
    setTimeout(() => {
      if (running.heard !== false) return;
      this.#died(running, "it hangs");
      this.#trust(running);
    }, LAST_WORD_MS);
  }

  /** Records that the worker lives. */
  #trust(running: Running): void {
    running.heard = null;
    for (const load of running.loads.splice(0)) load();
  }

  #died(running: Running, why: string): void {
    running.worker.terminate();
    if (this.#running !== running || running.failure) return;
    const told = `The engine's worker failed: ${why}. Load the model again${running.card ? ": engine.reload()" : ""}.`;
    const error = toErrorRecord(new DeviceError(told, { code: "worker-failed" }));
    running.failure = error;
    running.heard = null;
    for (const { client, question } of this.#askers.values())
      client.port.postMessage(refusalOf(question, error));
    this.#askers.clear();
    this.#fromWorker(running, { type: running.card ? "lost" : "failed", error });
  }

  #abort(id: number): void {
    this.#askers.delete(id);
    if (!this.#running?.failure) this.#running?.worker.postMessage({ type: "abort", id });
  }

  /** Ends the engine. */
  end(): void {
    const running = this.#running;
    this.#running = null;
    if (!running || running.failure) return;
    running.worker.postMessage({ type: "dispose" });
    running.ending = setTimeout(() => running.worker.terminate(), DISPOSE_TIMEOUT_MS);
  }
}
