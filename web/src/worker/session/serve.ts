import { DeviceError, toErrorRecord } from "../../protocol/errors.js";
import type { AnswerEvent, LoadProgress, LoadStep, ModelCard, ToWorker } from "../../protocol/messages.js";
import type { WorkerScope } from "../../protocol/ports.js";
import { refusalOf } from "../../protocol/refusal.js";
import type { Host } from "../host.js";
import { LoadFraction } from "../loading/fraction.js";
import type { Parts } from "../loading/parts.js";
import { Session } from "./session.js";

/** The worker's side of the connection: loads one model and answers until it is disposed of. */

/** Progress is throttled, because a message for each chunk of a download would keep the page busy. */
const PROGRESS_INTERVAL_MS = 50;

/** Answers the messages that come over `scope`. */
export function serve(scope: WorkerScope, host: Host, parts: Parts): void {
  const server = new Server(scope, host, parts);
  scope.addEventListener("message", ({ data }) => server.handle(data));
  scope.postMessage({ type: "started" });
}

class Server {
  readonly #loading = new AbortController();
  #session: Session | null = null;
  #loaded: Promise<void> = Promise.resolve();
  #lastProgress = 0;
  readonly #fraction = new LoadFraction();
  /** The callers that wait for the page's answer about a load, by load. */
  readonly #askers = new Map<string, (left: boolean) => void>();

  constructor(
    private readonly scope: WorkerScope,
    private readonly host: Host,
    private readonly parts: Parts,
  ) {}

  handle(message: ToWorker): void {
    switch (message.type) {
      case "load":
        this.#loaded = this.#load(message);
        return;
      case "left":
        this.#askers.get(message.load)?.(message.left);
        return;
      case "generate":
        this.#generate(message);
        return;
      case "embed":
        this.#embed(message);
        return;
      case "abort":
        this.#session?.abort(message.id);
        return;
      case "stats":
        if (this.#session)
          this.scope.postMessage({ type: "stats", id: message.id, stats: this.#session.stats() });
        else this.scope.postMessage(refusalOf(message, toErrorRecord(notLoaded())));
        return;
      case "count":
        void this.#count(message);
        return;
      case "profile":
        void this.#profile(message);
        return;
      case "ping":
        this.scope.postMessage({ type: "pong" });
        return;
      case "dispose":
        void this.#dispose();
    }
  }

  async #load(message: Extract<ToWorker, { type: "load" }>): Promise<void> {
    const { url, settings, load } = message;
    const onWarning = (message: string): void => this.scope.postMessage({ type: "warning", message });
    try {
      const onProgress = (step: LoadStep): void => this.#onProgress(step);
      const hasLeft = (other: string): Promise<boolean> => this.#hasLeft(other);
      const { host, parts } = this;
      const onCard = (card: ModelCard): void => this.scope.postMessage({ type: "card", card });
      const onLost = (error: Error): void =>
        this.scope.postMessage({ type: "lost", error: toErrorRecord(error) });
      const { signal } = this.#loading;
      const hooks = { signal, load, hasLeft, onProgress, onWarning, onCard, onLost, host, parts };
      this.#session = await Session.load(new URL(url), settings, hooks);
      this.#onProgress({ phase: "ready" });
      this.scope.postMessage({ type: "loaded", card: this.#session.card() });
    } catch (error) {
      this.scope.postMessage({ type: "failed", error: toErrorRecord(error) });
    }
  }

  /** Asks the page, because workers have no localStorage. */
  #hasLeft(load: string): Promise<boolean> {
    return new Promise((resolve) => {
      this.#askers.set(load, resolve);
      this.scope.postMessage({ type: "whether left", load });
    });
  }

  #generate({ id, request }: Extract<ToWorker, { type: "generate" }>): void {
    const tell = (answer: AnswerEvent): void => this.scope.postMessage({ type: "answer", id, answer });
    if (this.#session) void this.#session.generate(id, request, tell);
    else tell({ event: "error", error: toErrorRecord(notLoaded()) });
  }

  #embed({ id, inputs }: Extract<ToWorker, { type: "embed" }>): void {
    const tell = (answer: AnswerEvent): void => this.scope.postMessage({ type: "answer", id, answer });
    if (this.#session) void this.#session.embed(id, inputs, tell);
    else tell({ event: "error", error: toErrorRecord(notLoaded()) });
  }

  async #count({ id, prompt }: Extract<ToWorker, { type: "count" }>): Promise<void> {
    try {
      if (!this.#session) throw notLoaded();
      this.scope.postMessage({ type: "counted", id, tokens: await this.#session.count(prompt) });
    } catch (error) {
      this.scope.postMessage({ type: "counted", id, tokens: toErrorRecord(error) });
    }
  }

  async #profile({ id, options }: Extract<ToWorker, { type: "profile" }>): Promise<void> {
    try {
      if (!this.#session) throw notLoaded();
      this.scope.postMessage({ type: "profiled", id, profile: await this.#session.profile(options) });
    } catch (error) {
      this.scope.postMessage({ type: "profiled", id, profile: toErrorRecord(error) });
    }
  }

  async #dispose(): Promise<void> {
    this.#loading.abort();
    await this.#loaded;
    this.#session?.dispose();
    this.scope.postMessage({ type: "disposed", stats: this.#session?.stats() ?? null });
    this.#session = null;
  }

  #onProgress(step: LoadStep): void {
    const fraction = this.#fraction.after(step);
    const progress: LoadProgress = fraction === undefined ? step : { ...step, fraction };
    const now = performance.now();
    const last = progress.phase !== "weights" || progress.loaded === progress.total;
    if (!last && now - this.#lastProgress < PROGRESS_INTERVAL_MS) return;
    this.#lastProgress = now;
    this.scope.postMessage({ type: "progress", progress });
  }
}

/** The error of a message before the load, or after `dispose`. */
function notLoaded(): DeviceError {
  return new DeviceError("The model is not loaded.", { code: "disposed" });
}
