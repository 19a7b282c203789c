/**
 * One engine for all pages of an origin: in a SharedWorker, else in the worker of the page that holds a lock.
 * The others reach that page by broadcast, which carries the same line of messages as a worker's.
 */

import { Share, type SharePort } from "../here/share.js";
import type { StartWorker, WorkerPort } from "./client.js";
import { MovingPort } from "./moving-port.js";

/** What pages say to each other: who has the engine, and that a line to it is open. */
type Word =
  | { readonly type: "who leads" }
  | { readonly type: "leads"; readonly leader: string }
  | { readonly type: "hello"; readonly leader: string; readonly line: string };

/** Where an engine can be. */
export interface Places {
  readonly worker: () => SharedWorker;
  readonly overPort: (port: MessagePort) => WorkerPort;
  readonly startWorker: StartWorker;
}

export async function openShared(name: string, places: Places): Promise<WorkerPort> {
  const { overPort, startWorker: start } = places;
  const worker = openSharedWorker(places.worker);
  if (worker && (await starts(worker))) return overPort(worker.port);
  // Both are for pages of https and localhost alone.
  if (!("locks" in navigator) || typeof BroadcastChannel !== "function") return start(undefined);
  return new Tab(name, start).port;
}

function openSharedWorker(open: () => SharedWorker): SharedWorker | null {
  if (typeof SharedWorker !== "function") return null;
  try {
    return open();
  } catch {
    // Of another origin, such as a CDN, or forbidden, as by Trusted Types.
    return null;
  }
}

/** Whether its script runs. Ports keep what comes until they are read. */
function starts(worker: SharedWorker): Promise<boolean> {
  const settled = new AbortController();
  const once = { once: true, signal: settled.signal };
  return new Promise<boolean>((resolve) => {
    worker.addEventListener("error", () => resolve(false), once);
    worker.port.addEventListener("message", () => resolve(true), once);
    worker.port.start();
  }).finally(() => settled.abort());
}

/** One page's part: it leads, or follows whoever does. */
class Tab {
  readonly port: MovingPort;
  readonly #id = crypto.randomUUID();
  readonly #words: BroadcastChannel;
  #leader: string | null = null;
  #share: Share | null = null;
  /** Lets go of the lock, or of the place in the queue for it. */
  #leave: () => void = () => undefined;
  #isOpen = true;
  #lines = 0;

  constructor(
    private readonly name: string,
    private readonly start: StartWorker,
  ) {
    this.port = new MovingPort(() => this.#close());
    this.#words = new BroadcastChannel(name);
    this.#words.addEventListener("message", ({ data }: MessageEvent<Word>) => this.#hear(data));
    globalThis.addEventListener("pagehide", this.#onHide);
    globalThis.addEventListener("pageshow", this.#onShow);
    this.#join();
  }

  readonly #onHide = (): void => {
    this.port.hangUp();
    this.#leave();
  };

  /** The page is back from the browser's cache of pages. */
  readonly #onShow = ({ persisted }: PageTransitionEvent): void => {
    if (persisted && this.#isOpen) this.#join();
  };

  #join(): void {
    const waiting = new AbortController();
    this.#leader = null;
    this.#leave = () => waiting.abort();
    const leading = (): Promise<void> => this.#lead();
    // Rejects where it is left before it leads.
    navigator.locks.request(this.name, { signal: waiting.signal }, leading).catch(() => undefined);
    this.#say({ type: "who leads" });
  }

  #hear(word: Word): void {
    switch (word.type) {
      case "who leads":
        if (this.#share) this.#say({ type: "leads", leader: this.#id });
        return;
      case "leads":
        if (this.#leader !== word.leader && !this.#share && this.#isOpen) void this.#follow(word.leader);
        return;
      case "hello":
        if (word.leader === this.#id && this.#share) this.#welcome(this.#share, word.line);
    }
  }

  /** Opens a line to the page that leads, which sees by its lock whether this page lives. */
  async #follow(leader: string): Promise<void> {
    this.#leader = leader;
    const line = `${this.name} ${this.#id} ${this.#lines++}`;
    const channel = new BroadcastChannel(line);
    const hungUp = new Promise<void>((resolve) => {
      const close = (): void => {
        channel.close();
        resolve();
      };
      this.port.moveTo(channel, close);
    });
    void navigator.locks.request(line, () => {
      this.#say({ type: "hello", leader, line });
      return hungUp;
    });
  }

  #welcome(share: Share, line: string): void {
    const channel = new BroadcastChannel(line);
    const leave = share.connect(channel);
    void navigator.locks.request(line, () => {
      leave();
      channel.close();
    });
  }

  /** Has the engine until it is not wanted any more. */
  #lead(): Promise<void> {
    return new Promise((resolve) => {
      const leave = (): void => {
        this.#share = null;
        this.#leave = () => undefined;
        share.end();
        resolve();
        if (!this.#isOpen) this.#words.close();
      };
      const share = new Share(
        () => later(Promise.resolve(this.start(undefined))),
        // The page may be done with the engine while others are not.
        () => this.#isOpen || leave(),
      );
      this.#share = share;
      this.#leader = this.#id;
      this.#leave = leave;
      const { port1, port2 } = new MessageChannel();
      this.port.moveTo(port1, () => port1.close());
      port1.start();
      share.connect(port2 as SharePort);
      this.#say({ type: "leads", leader: this.#id });
    });
  }

  /** The page needs no engine any more. */
  #close(): void {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    if (this.#share && !this.#share.isIdle) return;
    globalThis.removeEventListener("pagehide", this.#onHide);
    globalThis.removeEventListener("pageshow", this.#onShow);
    this.#leave();
    this.#words.close();
  }

  #say(word: Word): void {
    this.#words.postMessage(word);
  }
}

/** A worker that is still being started. */
function later(starting: Promise<WorkerPort>): WorkerPort {
  const fail = (listener: (event: never) => void) => (error: unknown) =>
    listener({ message: error instanceof Error ? error.message : String(error) } as never);
  return {
    postMessage: (message) =>
      void starting.then(
        (worker) => worker.postMessage(message),
        () => undefined,
      ),
    addEventListener: (type: string, listener: (event: never) => void) =>
      void starting.then(
        (worker) => worker.addEventListener(type as "message", listener as () => void),
        type === "error" ? fail(listener) : () => undefined,
      ),
    terminate: () =>
      starting.then(
        (worker) => worker.terminate(),
        () => undefined,
      ),
  };
}
