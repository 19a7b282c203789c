import { DeviceError, RequestError, toErrorRecord } from "../both/errors.js";
import type { FromWorker, LoadProgress, LoadSettings, ModelCard, ToWorker } from "../both/messages.js";
import type { WorkerPort } from "../page/client.js";

/** One end of a channel, whose other end a page has. */
export interface SharePort {
  postMessage(message: FromWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: ToWorker }) => void): void;
  /** Of MessagePorts, which wait for it. */
  start?(): void;
}

interface Client {
  readonly port: SharePort;
  /** Whether it waits for the model, or has it. */
  joined: boolean;
}

/** Who asked, and by which number it knows its question. */
interface Asker {
  readonly client: Client;
  readonly id: number;
}

/** A worker and what it loads, or has loaded. */
interface Running {
  readonly worker: WorkerPort;
  readonly url: string;
  readonly settings: string;
  /** Who asked for it first; it alone can say whether it was left. */
  readonly first: Client;
  card: ModelCard | null;
  progress: LoadProgress | null;
  /** Whether its device is gone for good: whoever loads next begins anew. */
  lost: boolean;
}

/** Lets several pages have one engine: each thinks that the worker is its own. */
export class Share {
  readonly #clients = new Set<Client>();
  readonly #askers = new Map<number, Asker>();
  #running: Running | null = null;
  #nextId = 1;

  /** `onIdle`: nobody has the engine any more, or waits for it. */
  constructor(
    private readonly start: () => WorkerPort,
    private readonly onIdle: () => void = () => undefined,
  ) {}

  /** Lets a page join; returns what takes it out where the page cannot say so. */
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
        // Whether the worker lives is to be known, not whether this thread does.
        if (this.#running) this.#running.worker.postMessage(message);
        else port.postMessage({ type: "pong" });
        return;
      case "left":
        this.#running?.worker.postMessage(message);
        return;
      case "dispose":
        this.#leave(client);
        return;
      case "abort":
        for (const [id, asker] of this.#askers)
          if (asker.client === client && asker.id === message.id) this.#abort(id);
        return;
      default: {
        const id = this.#nextId++;
        this.#askers.set(id, { client, id: message.id });
        this.#running?.worker.postMessage({ ...message, id });
      }
    }
  }

  #load(client: Client, message: Extract<ToWorker, { type: "load" }>): void {
    const settings = JSON.stringify(message.settings satisfies LoadSettings);
    if (this.#running?.lost) this.end();
    const running = this.#running;
    if (!running) {
      const worker = this.start();
      const { url } = message;
      this.#running = { worker, url, settings, first: client, card: null, progress: null, lost: false };
      worker.addEventListener("message", ({ data }) => this.#fromWorker(worker, data));
      worker.addEventListener("error", ({ message }) => this.#died(worker, message));
      worker.postMessage(message);
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

  #fromWorker(worker: WorkerPort, message: FromWorker): void {
    if (message.type === "disposed") worker.terminate();
    const running = this.#running;
    if (running?.worker !== worker) return;
    switch (message.type) {
      case "started":
      case "disposed":
        return;
      case "whether left":
        running.first.port.postMessage(message);
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
        asker?.client.port.postMessage({ ...message, id: asker.id });
      }
    }
  }

  #tellAll(message: FromWorker): void {
    for (const { port, joined } of this.#clients) if (joined) port.postMessage(message);
  }

  /** The model goes with the last page that had it. */
  #leave(client: Client): void {
    if (!this.#clients.delete(client)) return;
    for (const [id, asker] of this.#askers) if (asker.client === client) this.#abort(id);
    client.port.postMessage({ type: "disposed", stats: null });
    if (!this.isIdle) return;
    this.end();
    this.onIdle();
  }

  #died(worker: WorkerPort, why: string): void {
    if (this.#running?.worker !== worker) return;
    const told = `The engine's worker failed: ${why || "it did not start"}. Load the model again.`;
    const error = toErrorRecord(new DeviceError(told, { code: "worker-failed" }));
    for (const { client, id } of this.#askers.values())
      client.port.postMessage({ type: "answer", id, answer: { event: "error", error } });
    this.#askers.clear();
    this.#fromWorker(worker, { type: this.#running.card ? "lost" : "failed", error });
  }

  #abort(id: number): void {
    this.#askers.delete(id);
    this.#running?.worker.postMessage({ type: "abort", id });
  }

  /** Ends the engine. */
  end(): void {
    this.#running?.worker.postMessage({ type: "dispose" });
    this.#running = null;
  }
}
