import { PageAllocator } from "./page-allocator.js";
import { type Node, PrefixIndex } from "./prefix-index.js";
import { Window } from "./window.js";

/** A copy that the device must make before the next step: page `from` of a group to page `to`. */
export type PageCopy = readonly [group: number, from: number, to: number];

/** The pages of one group that a sequence holds: pages of the columns of its page table from `first` on. */
export interface Held {
  readonly first: number;
  readonly pages: readonly number[];
}

/**
 * Tokens whose keys and values are in the cache. For each group, `held` covers at least the pages that rows
 * behind `tokens` read; pages beyond are reserved for the next tokens.
 */
export interface CachedSequence {
  readonly slot: number;
  readonly tokens: readonly number[];
  readonly held: readonly Held[];
}

/** One page group: how far its layers look back, and its pages. */
interface Group {
  readonly window: Window;
  readonly allocator: PageAllocator;
}

class Entry implements CachedSequence {
  constructor(
    readonly slot: number,
    readonly tokens: number[],
    readonly held: { first: number; readonly pages: number[] }[],
    /** The node of the prefix index at which the full pages of the tokens end. */
    public node: Node,
  ) {}
}

/**
 * All sequences in flight: gives out slots and pages, shares prefixes, copies on write, evicts.
 *
 * Layers that look equally far back are a *group* with a pool of pages of its own. In a group without a
 * window a sequence keeps all its pages. In a group with a window it keeps the pages that its rows still
 * read: a page is given back as soon as the last step that needed it has been read, and stays in the prefix
 * index while there is room.
 *
 * Every operation that can run out of room either succeeds, or changes nothing and returns null. The Python
 * runtime has the same class; both pass the vectors in tests/vectors/cache.
 */
export class SequenceTable {
  readonly groups: readonly Group[];
  readonly index: PrefixIndex;
  readonly #entries = new Map<number, Entry>();

  /** `pages` and `windows` have one number for each group; a window is in positions, null for no window. */
  constructor(
    pages: readonly number[],
    readonly pageSize: number,
    readonly slots: number,
    windows: readonly (number | null)[] = [null],
  ) {
    if (pages.length !== windows.length)
      throw new Error(`${pages.length} numbers of pages for ${windows.length} groups`);
    this.groups = windows.map((size, group) => ({
      window: new Window(size, pageSize),
      allocator: new PageAllocator(pages[group] ?? 0),
    }));
    this.index = new PrefixIndex(
      this.groups.map(({ window }) => window),
      pageSize,
    );
  }

  /** The pages of a group that a reservation can get: free pages and evictable pages. */
  available(group: number): number {
    return (this.groups[group]?.allocator.freeCount ?? 0) + this.index.idleCount(group);
  }

  /** The number of sequences that can still be opened. */
  get freeSlots(): number {
    return this.slots - this.#entries.size;
  }

  /** The open sequences by slot. */
  sequences(): CachedSequence[] {
    return [...this.#entries.values()].sort((a, b) => a.slot - b.slot);
  }

  /**
   * The number of positions, at most `context`, that a new sequence can have now if it advances by up to
   * `rows` positions a step.
   */
  longest(rows: number, context: number): number {
    return Math.min(
      ...this.groups.map(({ window }, group) => window.longest(this.available(group), rows, context)),
    );
  }

  /** The number of pages that `length` tokens fill; the last page may be filled in part. */
  pagesFor(length: number): number {
    return Math.ceil(length / this.pageSize);
  }

  /**
   * Opens a sequence that will hold `tokens`, in the lowest free slot, starting from their longest cached
   * prefix. At least one of the tokens is left to compute, because the caller needs its logits. Returns null
   * if no slot is free.
   */
  open(tokens: readonly number[]): CachedSequence | null {
    const slot = this.#freeSlot();
    if (slot === null) return null;
    const path = this.index.lookup(tokens, Math.floor(Math.max(tokens.length - 1, 0) / this.pageSize));
    const length = path.length * this.pageSize;
    const held = this.groups.map(({ window }, group) => {
      const first = window.firstColumn(length);
      return { first, pages: path.slice(first).flatMap(({ pages }) => pages[group] ?? []) };
    });
    return this.#add(slot, tokens.slice(0, length), held, path.at(-1) ?? this.index.root);
  }

  /**
   * Makes the positions from the end of the sequence up to `length` writable; in groups with a window up to
   * `soon`, because such a group gives pages back as the sequence advances and gets the next ones then.
   * Returns the page copies to make first: a last page that another holder can see is copied before it is
   * written. Returns null if there are not enough pages.
   */
  reserve(sequence: CachedSequence, length: number, soon = length): PageCopy[] | null {
    const entry = this.#entry(sequence);
    const needs = entry.held.map(({ first, pages }, group) => {
      const until = this.groups[group]?.window.size === null ? length : Math.min(soon, length);
      const shared = this.#sharedTail(entry, group, until);
      return { shared, missing: Math.max(this.pagesFor(until) - first - pages.length, 0) };
    });
    if (needs.some(({ shared, missing }, group) => missing + Number(shared) > this.available(group)))
      return null;
    const copies: PageCopy[] = [];
    for (const [group, { shared, missing }] of needs.entries()) {
      const { first, pages } = heldOf(entry, group);
      if (shared) {
        const column = Math.floor(entry.tokens.length / this.pageSize) - first;
        const old = pageAt(pages, column);
        const fresh = this.#take(group);
        pages[column] = fresh;
        this.#drop(group, old);
        copies.push([group, old, fresh]);
      }
      for (let i = 0; i < missing; i++) pages.push(this.#take(group));
    }
    return copies;
  }

  /** The greatest length, up to `length`, that `reserve` would grant now. */
  reservable(sequence: CachedSequence, length: number): number {
    const entry = this.#entry(sequence);
    return entry.held.reduce((most, { first, pages }, group) => {
      const spare = this.available(group) - Number(this.#sharedTail(entry, group, most));
      const granted = spare < 0 ? entry.tokens.length : (first + pages.length + spare) * this.pageSize;
      return Math.min(most, granted);
    }, length);
  }

  /** The length up to which positions have their pages in every group. */
  writable(sequence: CachedSequence): number {
    return Math.min(...sequence.held.map(({ first, pages }) => first + pages.length)) * this.pageSize;
  }

  /**
   * Records tokens that have been computed in reserved positions. Pages that became full enter the prefix
   * index; if the index has a page with the same content, the sequence takes that page and gives its own
   * back. Rows that are still to be read lie behind these tokens, so pages before all windows of these rows
   * are given back, first page first.
   */
  append(sequence: CachedSequence, added: readonly number[]): void {
    const entry = this.#entry(sequence);
    const { tokens } = entry;
    const first = Math.floor(tokens.length / this.pageSize);
    if (tokens.length + added.length > this.writable(entry))
      throw new Error(
        `${added.length} tokens do not fit the ${this.writable(entry) - tokens.length} positions left: ` +
          "reserve before append",
      );
    for (const token of added) tokens.push(token);
    const full = Math.floor(tokens.length / this.pageSize);
    for (let column = first; column < full; column++) this.#publish(entry, column);
    for (const [group, held] of entry.held.entries()) {
      const kept = this.groups[group]?.window.firstColumn(tokens.length) ?? 0;
      if (kept <= held.first) continue;
      for (const page of held.pages.splice(0, kept - held.first)) this.#drop(group, page);
      held.first = kept;
    }
  }

  /**
   * The least length above 0 to which the sequence can be truncated; the pages before it have been given
   * back.
   */
  leastLength(sequence: CachedSequence): number {
    return Math.max(...this.groups.map(({ window }, i) => window.leastLength(sequence.held[i]?.first ?? 0)));
  }

  /**
   * Opens a second sequence with the same tokens, which shares all their pages. Returns null if no slot is
   * free.
   */
  fork(sequence: CachedSequence): CachedSequence | null {
    const { tokens, held, node } = this.#entry(sequence);
    const slot = this.#freeSlot();
    if (slot === null) return null;
    const until = this.pagesFor(tokens.length);
    const shared = held.map(({ first, pages }) => ({ first, pages: pages.slice(0, until - first) }));
    return this.#add(slot, [...tokens], shared, node);
  }

  /**
   * Keeps the first `length` tokens, 0 or at least `leastLength`; gives back the pages beyond them, last page
   * first.
   */
  truncate(sequence: CachedSequence, length: number): void {
    const entry = this.#entry(sequence);
    const { tokens, held } = entry;
    const least = this.leastLength(entry);
    if (length !== 0 && (length < least || length > tokens.length))
      throw new Error(
        `cannot truncate ${tokens.length} tokens to ${length}: it can be 0, or ${least} to ${tokens.length}`,
      );
    const full = Math.floor(tokens.length / this.pageSize);
    tokens.length = length;
    for (const [group, each] of held.entries()) {
      const keep = Math.max(this.pagesFor(length) - each.first, 0);
      while (each.pages.length > keep) this.#drop(group, each.pages.pop() ?? 0);
      if (length === 0) each.first = 0;
    }
    let { node } = entry;
    for (let i = Math.floor(length / this.pageSize); i < full; i++) node = node.parent ?? node;
    this.#move(entry, node);
  }

  /** Closes the sequence. Its full pages stay in the prefix index until they are evicted. */
  release(sequence: CachedSequence): void {
    this.truncate(sequence, 0);
    this.index.leave(this.#entry(sequence).node);
    this.#entries.delete(sequence.slot);
  }

  /** Evicts every idle page; returns the number of evicted pages. */
  clear(): number {
    let count = 0;
    for (const [group, { allocator }] of this.groups.entries())
      for (; this.index.idleCount(group) > 0; count++) allocator.free(this.index.evict(group));
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

  #add(
    slot: number,
    tokens: number[],
    held: { first: number; pages: number[] }[],
    node: Node,
  ): CachedSequence {
    for (const [group, { pages }] of held.entries()) for (const page of pages) this.#hold(group, page);
    const entry = new Entry(slot, tokens, held, this.index.enter(node));
    this.#entries.set(slot, entry);
    return entry;
  }

  /** Whether the page to be written next is partly filled and has another holder. */
  #sharedTail(entry: Entry, group: number, length: number): boolean {
    const { tokens } = entry;
    if (tokens.length % this.pageSize === 0 || length <= tokens.length) return false;
    const { first, pages } = heldOf(entry, group);
    const page = pageAt(pages, Math.floor(tokens.length / this.pageSize) - first);
    return (this.groups[group]?.allocator.refs(page) ?? 0) > 1 || this.index.has(group, page);
  }

  /**
   * Enters a full page for each group. Pages that the index knows already replace the sequence's own pages.
   */
  #publish(entry: Entry, column: number): void {
    const start = column * this.pageSize;
    const own = entry.held.map(({ first, pages }) => pageAt(pages, column - first));
    const node = this.index.insert(entry.node, entry.tokens.slice(start, start + this.pageSize), own);
    for (const [group, page] of own.entries()) {
      const known = node.pages[group] ?? page;
      if (known === page) continue;
      this.#hold(group, known);
      const { first, pages } = heldOf(entry, group);
      pages[column - first] = known;
      this.#drop(group, page);
    }
    this.#move(entry, node);
  }

  /** Records the node at which the full pages of the sequence now end. */
  #move(entry: Entry, node: Node): void {
    const before = entry.node;
    entry.node = this.index.enter(node);
    this.index.leave(before);
  }

  #take(group: number): number {
    const { allocator } = this.#group(group);
    if (allocator.freeCount === 0) allocator.free(this.index.evict(group));
    return allocator.take();
  }

  #hold(group: number, page: number): void {
    this.index.revive(group, page);
    this.#group(group).allocator.retain(page);
  }

  #drop(group: number, page: number): void {
    const { allocator } = this.#group(group);
    if (allocator.release(page) > 0) return;
    if (this.index.has(group, page)) this.index.park(group, page);
    else allocator.free(page);
  }

  #group(group: number): Group {
    const found = this.groups[group];
    if (!found) throw new Error(`there is no group ${group}`);
    return found;
  }
}

function heldOf({ held, slot }: Entry, group: number): Entry["held"][number] {
  const found = held[group];
  if (!found) throw new Error(`the sequence in slot ${slot} has no group ${group}`);
  return found;
}

function pageAt(pages: readonly number[], at: number): number {
  const page = pages[at];
  if (page === undefined) throw new Error("the sequence does not hold this page");
  return page;
}
