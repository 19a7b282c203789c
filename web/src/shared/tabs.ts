/**
 * Shares one engine among all pages of an origin: in a SharedWorker, or else in the worker of the page that
 * holds a lock. The other pages reach that page by broadcast, with the messages of a worker.
 */

import type { StartWorker, WorkerPort } from "../protocol/ports.js";
import type { Pulse } from "../protocol/pulse.js";
import { MovingPort } from "./moving-port.js";
import { Share, type SharePort } from "./share.js";

/**
 * Seconds that the page which has the engine may say nothing while another waits for an answer: browsers
 * freeze background pages with their workers, and a frozen page keeps its locks. The page's own thread
 * answers, so a busy engine is not taken for a frozen page.
 */
const SILENCE = 8;
/**
 * Seconds that a SharedWorker may take for its first message, because one that hangs sends none to a later
 * page. Time in which a page is frozen does not count; otherwise the page would load the model a second time,
 * beside the worker.
 */
const FIRST_WORD = 30;
/** How long the page that takes over waits for a message of another page that does so. */
const LAST_WORD_MS = 1000;

/** Messages between pages: which page has the engine, and that a connection to it is open. */
type Word =
  | { readonly type: "who leads" }
  /**
   * `since`, in ms of the clock, grows with every page that leads, so that a page learns that it was replaced
   * while it was frozen.
   */
  | { readonly type: "leads"; readonly leader: string; readonly since: number }
  | { readonly type: "hello"; readonly leader: string; readonly line: string };

/** The places where an engine can be. */
export interface Places {
  readonly worker: () => SharedWorker;
  readonly overPort: (port: MessagePort) => WorkerPort;
  readonly startWorker: StartWorker;
  /**
   * `Pulse` is passed in by the caller, who has it loaded already, because each file is a request to the
   * server.
   */
  readonly Pulse: typeof Pulse;
}

export async function openShared(name: string, places: Places): Promise<WorkerPort> {
  const { overPort, startWorker } = places;
  const worker = openSharedWorker(places.worker);
  if (worker && (await starts(worker, places.Pulse))) return overPort(worker.port);
  worker?.port.close();
  // Locks and broadcasts exist only in pages of https and localhost.
  if (!("locks" in navigator) || typeof BroadcastChannel !== "function") return startWorker(undefined);
  return new Tab(name, places).port;
}

function openSharedWorker(open: () => SharedWorker): SharedWorker | null {
  if (typeof SharedWorker !== "function") return null;
  try {
    return open();
  } catch {
    // The SharedWorker is of another origin, such as a CDN, or forbidden, as by Trusted Types.
    return null;
  }
}

/** Whether the worker's script runs and answers. Ports keep messages until they are read. */
function starts(worker: SharedWorker, Beat: typeof Pulse): Promise<boolean> {
  const settled = new AbortController();
  const once = { once: true, signal: settled.signal };
  let pulse: Pulse | null = null;
  return new Promise<boolean>((resolve) => {
    worker.addEventListener("error", () => resolve(false), once);
    worker.port.addEventListener("message", () => resolve(true), once);
    worker.port.start();
    pulse = new Beat(FIRST_WORD, () => true, { ask: () => undefined, silent: () => resolve(false) });
    pulse.watch();
  }).finally(() => {
    (pulse as Pulse | null)?.end();
    settled.abort();
  });
}

/** One page: it leads, or follows the leader. */
class Tab {
  readonly port: MovingPort;
  readonly #id = crypto.randomUUID();
  readonly #words: BroadcastChannel;
  #leader: string | null = null;
  #share: Share | null = null;
  /** Releases the lock, or the place in the queue for it. */
  #leave: () => void = () => undefined;
  #isOpen = true;
  #lines = 0;
  /**
   * When the newest leading page began to lead, as far as this page knows, and how many messages came from a
   * leader.
   */
  #since = 0;
  #heard = 0;
  readonly #pulse: Pulse;

  constructor(
    private readonly name: string,
    private readonly places: Places,
  ) {
    this.port = new MovingPort(
      () => this.#pulse.watch(),
      () => this.#close(),
    );
    this.#pulse = new places.Pulse(SILENCE, () => !this.#share && this.port.isAwaited, {
      ask: () => this.#say({ type: "who leads" }),
      silent: () => void this.#depose(),
    });
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

  /** Runs when the page is back from the browser's cache of pages. */
  readonly #onShow = ({ persisted }: PageTransitionEvent): void => {
    if (persisted && this.#isOpen) this.#join();
  };

  /** Leads once the lock is free, or with `steal` at once; follows until then. */
  #join(steal = false): void {
    const waiting = new AbortController();
    this.#leader = null;
    this.#leave = () => waiting.abort();
    const options = steal ? { steal } : { signal: waiting.signal };
    // The request rejects if the page leaves before it leads, or if another page has taken the lock.
    navigator.locks.request(this.name, options, () => this.#lead()).catch(() => this.#abdicate());
    this.#say({ type: "who leads" });
  }

  #hear(word: Word): void {
    switch (word.type) {
      case "who leads":
        if (this.#share) this.#sayLeads();
        return;
      case "leads":
        this.#hearOf(word);
        return;
      case "hello":
        if (word.leader === this.#id && this.#share) this.#welcome(this.#share, word.line);
    }
  }

  #hearOf({ leader, since }: Extract<Word, { type: "leads" }>): void {
    if (since < this.#since) {
      if (this.#share) this.#sayLeads();
      return;
    }
    this.#since = since;
    this.#heard += 1;
    this.#pulse.heard();
    if (this.#share) this.#abdicate();
    else if (this.#leader !== leader && this.#isOpen) void this.#follow(leader);
  }

  /**
   * Takes over from a silent page. Pages do so one at a time, and each first listens whether another page has
   * done so.
   */
  async #depose(): Promise<void> {
    await navigator.locks.request(`${this.name} heir`, { ifAvailable: true }, async (lock) => {
      const heard = this.#heard;
      this.#say({ type: "who leads" });
      await new Promise((resolve) => setTimeout(resolve, LAST_WORD_MS));
      if (!lock || heard !== this.#heard || this.#share || !this.#isOpen) return;
      this.#leave();
      this.#join(true);
    });
    this.#pulse.watch();
  }

  /** Follows another page, which leads by now. */
  #abdicate(): void {
    if (!this.#share) return;
    this.#leave();
    if (this.#isOpen) this.#join();
  }

  /** Opens a connection to the leading page; a lock tells the leading page whether this page lives. */
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
    const held = navigator.locks.request(line, () => {
      this.#say({ type: "hello", leader, line });
      return hungUp;
    });
    // A page that is being left loses its locks.
    held.catch(() => undefined);
  }

  #welcome(share: Share, line: string): void {
    const channel = new BroadcastChannel(line);
    const leave = share.connect(channel);
    const gone = (): void => {
      leave();
      channel.close();
    };
    navigator.locks.request(line, gone).catch(gone);
  }

  /** Runs the engine until no page wants it any more. */
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
        () => starting(Promise.resolve(this.places.startWorker(undefined))),
        // This page may be done with the engine while others still use it.
        () => this.#isOpen || leave(),
      );
      this.#share = share;
      this.#since = Math.max(Date.now(), this.#since + 1);
      this.#leader = this.#id;
      this.#leave = leave;
      const { port1, port2 } = new MessageChannel();
      this.port.moveTo(port1, () => port1.close());
      port1.start();
      share.connect(port2 as SharePort);
      this.#sayLeads();
    });
  }

  /** Closes the connection, because this page needs no engine any more. */
  #close(): void {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    this.#pulse.end();
    if (this.#share && !this.#share.isIdle) return;
    globalThis.removeEventListener("pagehide", this.#onHide);
    globalThis.removeEventListener("pageshow", this.#onShow);
    this.#leave();
    this.#words.close();
  }

  #sayLeads(): void {
    this.#say({ type: "leads", leader: this.#id, since: this.#since });
  }

  #say(word: Word): void {
    this.#words.postMessage(word);
  }
}

/** A port to a worker that is still being started. */
function starting(worker: Promise<WorkerPort>): WorkerPort {
  const fail = (listener: (event: never) => void) => (error: unknown) =>
    listener({ message: error instanceof Error ? error.message : String(error) } as never);
  return {
    postMessage: (message) =>
      void worker.then(
        (started) => started.postMessage(message),
        () => undefined,
      ),
    addEventListener: (type: string, listener: (event: never) => void) =>
      void worker.then(
        (started) => started.addEventListener(type as "message", listener as () => void),
        type === "error" ? fail(listener) : () => undefined,
      ),
    terminate: () =>
      worker.then(
        (started) => started.terminate(),
        () => undefined,
      ),
  };
}
