/**
 * Pages 0…count−1, each with a reference count.
 *
 * A page is *free* (on the free list), *held* (its count is positive), or *idle*: it has no holder, but its
 * content may be wanted again. Whoever releases a page for the last time decides: `free` the page, or leave
 * it idle. The free list is a stack: a fresh allocator hands out 0, 1, 2, …; after that the page that was
 * freed last is handed out first.
 */
export class PageAllocator {
  readonly #refs: Int32Array;
  readonly #free: number[];

  constructor(readonly count: number) {
    this.#refs = new Int32Array(count);
    this.#free = Array.from({ length: count }, (_, i) => count - 1 - i);
  }

  /** The number of pages that `take` can hand out. */
  get freeCount(): number {
    return this.#free.length;
  }

  /** The free pages in the order in which `take` will hand them out. */
  freePages(): number[] {
    return this.#free.toReversed();
  }

  refs(page: number): number {
    return this.#refs[page] ?? 0;
  }

  /** Hands out a free page with one holder. The caller has checked `freeCount`. */
  take(): number {
    const page = this.#free.pop();
    if (page === undefined) throw new Error("take() without a free page");
    this.#refs[page] = 1;
    return page;
  }

  /** Adds a holder to a held or idle page. */
  retain(page: number): void {
    this.#refs[page] = this.refs(page) + 1;
  }

  /** Removes a holder and returns how many are left. At 0 the page is idle. */
  release(page: number): number {
    const left = this.refs(page) - 1;
    if (left < 0) throw new Error(`page ${page} is released more often than it was taken`);
    this.#refs[page] = left;
    return left;
  }

  /** Puts an idle page on the free list. */
  free(page: number): void {
    if (this.refs(page) !== 0) throw new Error(`page ${page} is still held by ${this.refs(page)} sequences`);
    this.#free.push(page);
  }
}
