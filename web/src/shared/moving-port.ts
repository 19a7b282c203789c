import { DeviceError, type ErrorRecord, toErrorRecord } from "../protocol/errors.js";
import type { FromWorker, Question, ToWorker } from "../protocol/messages.js";
import type { WorkerPort } from "../protocol/ports.js";
import { refusalOf } from "../protocol/refusal.js";

/** The present carrier of the connection. */
export interface Carrier {
  postMessage(message: ToWorker): void;
  addEventListener(type: "message", listener: (event: { readonly data: FromWorker }) => void): void;
}

interface Open {
  readonly question: Question;
  /** Whether the page has a part of the answer. */
  begun: boolean;
}

/**
 * A page's connection to an engine that may move to another place: it loads the same model there, repeats
 * requests without an answer so far, and ends partly answered ones.
 */
export class MovingPort implements WorkerPort {
  readonly #open = new Map<number, Open>();
  #tell: (message: FromWorker) => void = () => undefined;
  #carrier: Carrier | null = null;
  #closeCarrier: () => void = () => undefined;
  #load: ToWorker | null = null;
  /**
   * Whether the page has been told that the model is loaded, and whether the model is loaded at the engine's
   * present place.
   */
  #told = false;
  #loaded = false;
  #failure: ErrorRecord | null = null;

  /** `onAsk`: the page has sent a request. `onEnd`: the page is done with the engine. */
  constructor(
    private readonly onAsk: () => void,
    private readonly onEnd: () => void,
  ) {}

  /** Whether the page waits for the model, or for an answer. */
  get isAwaited(): boolean {
    return !this.#failure && (this.#open.size > 0 || (this.#load !== null && !this.#loaded));
  }

  addEventListener(type: string, listener: (event: never) => void): void {
    if (type === "message") this.#tell = (data) => listener({ data } as never);
  }

  terminate(): void {
    this.hangUp();
    this.onEnd();
  }

  postMessage(message: ToWorker): void {
    this.#send(message);
    this.onAsk();
  }

  #send(message: ToWorker): void {
    switch (message.type) {
      case "load":
        this.#load = message;
        this.#carrier?.postMessage(message);
        return;
      case "generate":
      case "embed":
      case "count":
      case "profile":
      case "stats":
        this.#open.set(message.id, { question: message, begun: false });
        if (this.#failure) this.#fail(this.#failure);
        else if (this.#loaded) this.#carrier?.postMessage(message);
        return;
      case "abort":
        this.#open.delete(message.id);
        break;
      case "dispose":
        this.#load = null;
        if (!this.#carrier) this.#tell({ type: "disposed", stats: null });
        break;
      case "ping":
        // Waiting for a place does not count as silence.
        if (!this.#carrier) this.#tell({ type: "pong" });
        break;
    }
    this.#carrier?.postMessage(message);
  }

  /** Moves the connection to `carrier`, where the engine is from now on; `close` ends `carrier`. */
  moveTo(carrier: Carrier, close: () => void): void {
    this.hangUp();
    this.#carrier = carrier;
    this.#closeCarrier = close;
    carrier.addEventListener("message", ({ data }) => {
      if (this.#carrier === carrier) this.#receive(data);
    });
    if (this.#failure === null) this.#endBegun();
  }

  /** Leaves the engine's present place. */
  hangUp(): void {
    this.#carrier?.postMessage({ type: "dispose" });
    this.#closeCarrier();
    this.#closeCarrier = () => undefined;
    this.#carrier = null;
    this.#loaded = false;
  }

  #receive(message: FromWorker): void {
    switch (message.type) {
      case "started":
        if (this.#load) this.#carrier?.postMessage(this.#load);
        break;
      case "loaded":
        this.#loaded = true;
        for (const { question } of this.#open.values()) this.#carrier?.postMessage(question);
        // After a move, the loaded model counts as a changed card, because its context length may differ.
        this.#tell(this.#told ? { type: "card", card: message.card } : message);
        this.#told = true;
        return;
      case "failed":
        if (!this.#told) break;
        this.#tell({ type: "lost", error: message.error });
        this.#fail(message.error);
        return;
      case "answer": {
        const open = this.#open.get(message.id);
        const { event } = message.answer;
        if (open && (event === "delta" || event === "finish")) open.begun = true;
        if (event === "end" || event === "embedded" || event === "error") this.#open.delete(message.id);
        break;
      }
      case "stats":
      case "counted":
      case "profiled":
        this.#open.delete(message.id);
    }
    this.#tell(message);
  }

  /** Fails everything: no place can load the model again. */
  #fail(error: ErrorRecord): void {
    this.#failure = error;
    for (const { question } of this.#open.values()) this.#tell(refusalOf(question, error));
    this.#open.clear();
  }

  #endBegun(): void {
    const why =
      "The page that computed this answer was closed or frozen. Ask again: another one loads the model.";
    const error = toErrorRecord(new DeviceError(why, { code: "device-lost" }));
    for (const [id, { begun }] of this.#open) {
      if (!begun) continue;
      this.#open.delete(id);
      this.#tell({ type: "answer", id, answer: { event: "error", error } });
    }
  }
}
