/** A queue that one side fills at its own pace and the other awaits. */
export class Channel<T> {
  readonly #items: T[] = [];
  #waiting: ((item: T) => void) | null = null;

  put(item: T): void {
    const waiting = this.#waiting;
    this.#waiting = null;
    if (waiting) waiting(item);
    else this.#items.push(item);
  }

  /** The next item. One taker at a time. */
  take(): Promise<T> {
    const item = this.#items.shift();
    if (item !== undefined) return Promise.resolve(item);
    return new Promise((resolve) => {
      this.#waiting = resolve;
    });
  }
}
