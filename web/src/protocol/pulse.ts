/** Checks whether a worker lives while a reply is awaited. */

/**
 * How many questions are asked within the patience. Each question counts once, however late its timer comes:
 * a page that was frozen, or slowed down in the background, has asked less often.
 */
const QUESTIONS = 8;

export interface PulseHooks {
  /** Requests any message from the worker. */
  readonly ask: () => void;
  /** Called if the worker has not answered within the patience. */
  readonly silent: () => void;
}

export class Pulse {
  #timer: ReturnType<typeof setInterval> | null = null;
  /** The number of questions since the last message. */
  #missed = 0;
  #asked = false;

  /** `patience` is the time without a message, in seconds. `isAwaited` says whether a reply is awaited. */
  constructor(
    private readonly patience: number,
    private readonly isAwaited: () => boolean,
    private readonly hooks: PulseHooks,
  ) {}

  /** Starts to watch; the watch ends when no reply is awaited any more. */
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
    // One question at a time: a busy worker then finds one in its queue, not many.
    if (this.#asked) return;
    this.#asked = true;
    this.hooks.ask();
  }
}
