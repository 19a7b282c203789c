import { PageAllocator } from "./page-allocator.js";
import { PrefixIndex, ROOT } from "./prefix-index.js";

/** The device must copy page `from` to page `to` before the next step. */
export type PageCopy = readonly [from: number, to: number];

/**
 * Tokens whose keys and values are in the cache (or will be, once the steps already queued have run).
 * `pages` covers at least `tokens`; pages beyond are reserved for what comes next.
 */
export interface CachedSequence {
  readonly slot: number;
  readonly tokens: readonly number[];
  readonly pages: readonly number[];
}

class Entry implements CachedSequence {
  constructor(
    readonly slot: number,
    readonly tokens: number[],
    readonly pages: number[],
  ) {}
}

/**
 * All sequences in flight: gives out slots and pages, shares prefixes, copies on write, evicts.
 *
 * Every operation that can run out of room either succeeds, or changes nothing and returns null. The Python runtime
 * has the same class; both pass the vectors in tests/vectors/cache.
 */
export class SequenceTable {
  readonly allocator: PageAllocator;
  readonly index: PrefixIndex;
  readonly #entries = new Map<number, Entry>();

  constructor(
    pages: number,
    readonly pageSize: number,
    readonly slots: number,
  ) {
    this.allocator = new PageAllocator(pages);
    this.index = new PrefixIndex(pageSize);
  }

  /** Pages that a reservation can get: the free ones and the evictable ones. */
  get available(): number {
    return this.allocator.freeCount + this.index.idleCount;
  }

  /** How many more sequences can be opened. */
  get freeSlots(): number {
    return this.slots - this.#entries.size;
  }

  /** The open sequences by slot. */
  sequences(): CachedSequence[] {
    return [...this.#entries.values()].sort((a, b) => a.slot - b.slot);
  }

  /** Pages that `length` tokens fill, the last perhaps in part. */
  pagesFor(length: number): number {
    return Math.ceil(length / this.pageSize);
  }

  /**
   * Opens a sequence that will hold `tokens`, in the lowest free slot, starting from their longest cached prefix.
   * At least one of the tokens is left to compute, because its logits are wanted. Null when no slot is free.
   */
  open(tokens: readonly number[]): CachedSequence | null {
    const slot = this.#freeSlot();
    if (slot === null) return null;
    const pages = this.index.lookup(tokens, Math.floor(Math.max(tokens.length - 1, 0) / this.pageSize));
    for (const page of pages) this.#hold(page);
    return this.#add(slot, tokens.slice(0, pages.length * this.pageSize), pages);
  }

  /**
   * Makes the positions from the end of the sequence up to `length` writable. Returns the page copies to make first:
   * a last page that others can see is copied before it is written. Null when there are not enough pages.
   */
  reserve(sequence: CachedSequence, length: number): PageCopy[] | null {
    const { tokens, pages } = this.#entry(sequence);
    const shared = length > tokens.length ? this.#sharedTail(tokens, pages) : null;
    const missing = Math.max(this.pagesFor(length) - pages.length, 0);
    if (missing + (shared === null ? 0 : 1) > this.available) return null;
    const copies: PageCopy[] = [];
    if (shared !== null) {
      const fresh = this.#take();
      pages[shared.index] = fresh;
      this.#drop(shared.page);
      copies.push([shared.page, fresh]);
    }
    for (let i = 0; i < missing; i++) pages.push(this.#take());
    return copies;
  }

  /**
   * Records tokens in reserved positions. Pages that became full enter the prefix index; where it knows a page with
   * the same content, the sequence takes that page and gives its own back.
   */
  append(sequence: CachedSequence, added: readonly number[]): void {
    const { tokens, pages } = this.#entry(sequence);
    const first = Math.floor(tokens.length / this.pageSize);
    if (tokens.length + added.length > pages.length * this.pageSize)
      throw new Error(`${added.length} tokens do not fit ${pages.length} pages: reserve before append`);
    for (const token of added) tokens.push(token);
    const full = Math.floor(tokens.length / this.pageSize);
    for (let i = first; i < full; i++) this.#publish(tokens, pages, i);
  }

  /** A second sequence with the same tokens, sharing all their pages. Null when no slot is free. */
  fork(sequence: CachedSequence): CachedSequence | null {
    const slot = this.#freeSlot();
    if (slot === null) return null;
    const pages = sequence.pages.slice(0, this.pagesFor(sequence.tokens.length));
    for (const page of pages) this.#hold(page);
    return this.#add(slot, [...sequence.tokens], pages);
  }

  /** Keeps the first `length` tokens; gives back the pages beyond them, last first. */
  truncate(sequence: CachedSequence, length: number): void {
    const { tokens, pages } = this.#entry(sequence);
    if (length < 0 || length > tokens.length) throw new Error(`cannot truncate ${tokens.length} tokens to ${length}`);
    tokens.length = length;
    this.#shrink(pages, this.pagesFor(length));
  }

  /** Closes the sequence. Its full pages stay in the prefix index until they are evicted. */
  release(sequence: CachedSequence): void {
    this.#shrink(this.#entry(sequence).pages, 0);
    this.#entries.delete(sequence.slot);
  }

  /** Evicts every idle page; returns how many. */
  clear(): number {
    const count = this.index.idleCount;
    for (let i = 0; i < count; i++) this.allocator.free(this.index.evict());
    return count;
  }

  #entry(sequence: CachedSequence): Entry {
    const entry = this.#entries.get(sequence.slot);
    if (!entry || entry !== sequence) throw new Error(`the sequence in slot ${sequence.slot} is closed`);
    return entry;
  }

  #freeSlot(): number | null {
    for (let slot = 0; slot < this.slots; slot++) if (!this.#entries.has(slot)) return slot;
    return null;
  }

  #add(slot: number, tokens: number[], pages: number[]): CachedSequence {
    const entry = new Entry(slot, tokens, pages);
    this.#entries.set(slot, entry);
    return entry;
  }

  /** The page to be written next, if it is partly filled and somebody else can see it. */
  #sharedTail(tokens: readonly number[], pages: readonly number[]): { index: number; page: number } | null {
    if (tokens.length % this.pageSize === 0) return null;
    const index = Math.floor(tokens.length / this.pageSize);
    const page = pages[index];
    if (page === undefined) return null;
    return this.allocator.refs(page) > 1 || this.index.has(page) ? { index, page } : null;
  }

  #publish(tokens: readonly number[], pages: number[], i: number): void {
    const page = pages[i];
    if (page === undefined) return;
    const start = i * this.pageSize;
    const known = this.index.insert(pages[i - 1] ?? ROOT, tokens.slice(start, start + this.pageSize), page);
    if (known === page) return;
    this.#hold(known);
    pages[i] = known;
    this.#drop(page);
  }

  #shrink(pages: number[], keep: number): void {
    while (pages.length > keep) {
      const page = pages.pop();
      if (page !== undefined) this.#drop(page);
    }
  }

  #take(): number {
    if (this.allocator.freeCount === 0) this.allocator.free(this.index.evict());
    return this.allocator.take();
  }

  #hold(page: number): void {
    this.index.revive(page);
    this.allocator.retain(page);
  }

  #drop(page: number): void {
    if (this.allocator.release(page) > 0) return;
    if (this.index.has(page)) this.index.park(page);
    else this.allocator.free(page);
  }
}
