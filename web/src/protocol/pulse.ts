/** Checks whether a worker lives while a reply is awaited. */

/**
 * How often it is asked within the time that it may be silent. Each question counts once, however late its
 * timer comes: a page that was frozen, or held back in the background, has asked less often.
 */
const QUESTIONS = 8;

export interface PulseHooks {
  /** Requests a message; any message will do. */
  readonly ask: () => void;
  /** Called when it has not answered within its time. */
  readonly silent: () => void;
}

export class Pulse {
  #timer: ReturnType<typeof setInterval> | null = null;
  /** Number of requests since the last message. */
  #missed = 0;
  #asked = false;

  /** `patience`: seconds of silence. `isAwaited`: whether a silence matters. */
  constructor(
    private readonly patience: number,
    private readonly isAwaited: () => boolean,
    private readonly hooks: PulseHooks,
  ) {}

  /** Starts to watch; stops when nothing is awaited any more. */
  watch(): void {
    if (this.#timer || !Number.isFinite(this.patience) || !this.isAwaited()) return;
    this.heard();
    this.#timer = setInterval(() => this.#tick(), (1000 * this.patience) / QUESTIONS);
  }

  heard(): void {
    this.#missed = 0;
    this.#asked = false;
  }

  end(): void {
    if (this.#timer) clearInterval(this.#timer);
    this.#timer = null;
  }

  #tick(): void {
    if (!this.isAwaited()) {
      this.end();
      return;
    }
    if (this.#missed === QUESTIONS) {
      this.end();
      this.hooks.silent();
      return;
    }
    this.#missed += 1;
    // One request at a time: a busy worker finds one in its queue, not many.
    if (this.#asked) return;
    this.#asked = true;
    this.hooks.ask();
  }
}
