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
    /** Positions that the device was given; of states only the newest is held, the one behind them. */
    public written: number,
  ) {}

  /** States behind fewer positions that will enter the prefix index: pages by group, by the positions. */
  readonly kept = new Map<number, ReadonlyMap<number, number>>();
  /** How many states were kept. */
  stored = 0;
  /** The newest border, but the first: the next one takes its place. */
  passing: Node | null = null;
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

  readonly #states: readonly number[];

  /** `pages`, `windows` (positions, null: no window) and `strides` (of states, null: none) by group. */
  constructor(
    pages: readonly number[],
    readonly pageSize: number,
    readonly slots: number,
    windows: readonly (number | null)[] = [null],
    strides: readonly (number | null)[] = [],
  ) {
    if (pages.length !== windows.length)
      throw new Error(`${pages.length} numbers of pages for ${windows.length} groups`);
    this.groups = windows.map((size, group) => ({
      window: new Window(size, pageSize, strides[group] ?? null),
      allocator: new PageAllocator(pages[group] ?? 0),
    }));
    this.#states = [...this.groups.keys()].filter((group) => this.#stride(group) !== null);
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
   * `rows` positions a step, and if the sequences of `without` were closed.
   */
  longest(rows: number, context: number, without: readonly CachedSequence[] = []): number {
    return Math.min(
      ...this.groups.map(({ window }, group) =>
        window.longest(this.available(group) + this.#heldAlone(group, without), rows, context),
      ),
    );
  }

  /** The number of a group's pages that these sequences hold and no other does. */
  #heldAlone(group: number, sequences: readonly CachedSequence[]): number {
    const counts = new Map<number, number>();
    for (const { held } of sequences)
      for (const page of held[group]?.pages ?? []) counts.set(page, (counts.get(page) ?? 0) + 1);
    const { allocator } = this.#group(group);
    return [...counts].filter(([page, count]) => allocator.refs(page) === count).length;
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
      const read = path.slice(window.stride === null ? first : -1);
      return { first, pages: read.flatMap(({ pages }) => pages[group] ?? []) };
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
      const { window } = this.#group(group);
      const until = window.size === null ? length : Math.min(soon, length);
      const shared = this.#sharedTail(entry, group, until);
      return { shared, missing: Math.max(window.columns(until) - first - pages.length, 0) };
    });
    for (const [group, need] of needs.entries()) {
      const room = this.available(group);
      if (need.missing + Number(need.shared) <= room) continue;
      if (need.missing > room || !this.#ownTail(entry, group)) return null;
    }
    const copies: PageCopy[] = [];
    for (const [group, { shared, missing }] of needs.entries()) {
      const { first, pages } = heldOf(entry, group);
      if (shared && missing + 1 > this.available(group)) this.#giveUpBorder(entry, group);
      else if (shared) {
        const column = Math.floor(entry.written / this.#group(group).window.column) - first;
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
      const copied = this.#sharedTail(entry, group, most) && !this.#ownTail(entry, group);
      const spare = this.available(group) - Number(copied);
      const { column } = this.#group(group).window;
      const granted = spare < 0 ? entry.tokens.length : (first + pages.length + spare) * column;
      return Math.min(most, granted);
    }, length);
  }

  /**
   * The length up to which positions have their pages in every group; with states, pages that nobody else
   * sees.
   */
  writable(sequence: CachedSequence): number {
    const entry = this.#entry(sequence);
    if (this.#states.some((group) => this.#sharedTail(entry, group, entry.written + 1))) return entry.written;
    const ends = sequence.held.map(
      ({ first, pages }, group) => (first + pages.length) * this.#group(group).window.column,
    );
    return Math.min(...ends);
  }

  /** The device was given the rows up to `length`, read or not. */
  advance(sequence: CachedSequence, length: number): void {
    const entry = this.#entry(sequence);
    entry.written = Math.max(entry.written, length);
  }

  /**
   * The last border before the end of `length` tokens: where a later sequence with the same beginning can
   * start, if `keep` is called there. 0 if it can start at any page, because no group has states.
   */
  border(length: number): number {
    return this.#states.length > 0 ? Math.floor(Math.max(length - 1, 0) / this.pageSize) * this.pageSize : 0;
  }

  /**
   * Keeps the states behind the rows that the device was given, if these fill whole pages and the last of them
   * has not been read. The pages enter the prefix index when the rows have been read. The next row gets copies
   * of them.
   */
  keep(sequence: CachedSequence): void {
    const entry = this.#entry(sequence);
    const length = entry.written;
    if (length <= entry.tokens.length || length % this.pageSize !== 0 || entry.kept.has(length)) return;
    const kept = new Map<number, number>();
    for (const group of this.#states) {
      const page = this.#tail(entry, group); // none at a multiple of the stride: the next row takes a new page
      if (page === null) continue;
      this.#hold(group, page);
      kept.set(group, page);
    }
    if (kept.size > 0) entry.kept.set(length, kept);
  }

  /** How many of the first `common` tokens others can take from a sequence that will compute `length`. */
  leaves(length: number, common: number): number {
    const last = this.border(length);
    return this.#states.reduce((most, group) => {
      const stride = this.#stride(group) ?? 1;
      return last <= most ? last : Math.floor(most / stride) * stride;
    }, common);
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
      throw new Error(`${added.length} tokens have no room: reserve before append`);
    for (const token of added) tokens.push(token);
    entry.written = Math.max(entry.written, tokens.length);
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
    const least = this.groups.map(({ window }, group) =>
      window.stride === null ? window.leastLength(sequence.held[group]?.first ?? 0) : 0,
    );
    return Math.max(...least);
  }

  /**
   * The greatest length, up to `most` and the tokens, at which a fork of the sequence can continue; 0 if there
   * is none.
   */
  shareable(sequence: CachedSequence, most: number): number {
    const entry = this.#entry(sequence);
    const least = this.leastLength(entry);
    let end = Math.min(most, entry.tokens.length);
    while (end > 0 && this.#states.some((group) => this.#stateAt(entry, group, end) === null)) end -= 1;
    return end < least ? 0 : end;
  }

  /**
   * A second sequence with the first `length` tokens, sharing their pages. Null when no slot is free. `length`:
   * 0, or a result of `shareable`.
   */
  fork(sequence: CachedSequence, length = sequence.tokens.length): CachedSequence | null {
    const entry = this.#entry(sequence);
    this.#checkLength(entry, length, "fork");
    const slot = this.#freeSlot();
    if (slot === null) return null;
    const shared = entry.held.map((_, group) => this.#heldAt(entry, group, length));
    return this.#add(slot, entry.tokens.slice(0, length), shared, this.#nodeAt(entry, length));
  }

  /**
   * Keeps the first `length` tokens, 0 or at least `leastLength`; gives back the pages beyond them, last
   * first. With states it can be 0, all that was written, or a border.
   */
  truncate(sequence: CachedSequence, length: number): void {
    const entry = this.#entry(sequence);
    const { tokens, held } = entry;
    this.#checkLength(entry, length, "truncate");
    const back = new Map<number, Entry["held"][number]>(); // groups whose state is an earlier one
    if (length !== entry.written)
      for (const group of this.#states) back.set(group, this.#heldAt(entry, group, length));
    for (const [group, { pages }] of back) for (const page of pages) this.#hold(group, page);
    this.#move(entry, this.#nodeAt(entry, length));
    tokens.length = length;
    for (const [group, each] of held.entries()) {
      const until = back.has(group) ? 0 : this.#group(group).window.columns(length);
      const keep = Math.max(until - each.first, 0);
      while (each.pages.length > keep) this.#drop(group, each.pages.pop() ?? 0);
      if (length === 0) each.first = 0;
    }
    for (const [group, { first, pages }] of back) {
      heldOf(entry, group).first = first;
      heldOf(entry, group).pages.push(...pages);
    }
    for (const end of [...entry.kept.keys()]) if (end > length) this.#forgetKept(entry, end);
    entry.written = length;
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
    const entry = new Entry(slot, tokens, held, this.index.enter(node), tokens.length);
    this.#entries.set(slot, entry);
    return entry;
  }

  /** Whether the page to be written next is partly filled and has another holder. */
  #sharedTail(entry: Entry, group: number, length: number): boolean {
    const page = length > entry.written ? this.#tail(entry, group) : null;
    return page !== null && (this.#group(group).allocator.refs(page) > 1 || this.index.has(group, page));
  }

  /** The page of the column that the next row continues; null if the row begins a column. */
  #tail(entry: Entry, group: number): number | null {
    const { column } = this.#group(group).window;
    const { first, pages } = heldOf(entry, group);
    return entry.written % column === 0 ? null : (pages[Math.floor(entry.written / column) - first] ?? null);
  }

  /** Whether the sequence can write its shared tail in place, if it gives up the border there. */
  #ownTail(entry: Entry, group: number): boolean {
    const page = this.#tail(entry, group);
    const kept = page !== null && entry.kept.get(entry.written)?.get(group) === page;
    const own = this.#stride(group) !== null && page !== null;
    return own && this.#group(group).allocator.refs(page) === 1 + Number(kept);
  }

  /** The tail becomes the sequence's own: its state is lost to others. */
  #giveUpBorder(entry: Entry, group: number): void {
    this.#forgetKept(entry, entry.written);
    const page = this.#tail(entry, group);
    if (page !== null) this.index.withdraw(group, page);
  }

  #forgetKept(entry: Entry, length: number): void {
    for (const [group, page] of entry.kept.get(length) ?? []) this.#drop(group, page);
    entry.kept.delete(length);
  }

  #checkLength(entry: Entry, length: number, what: string): void {
    const most = entry.tokens.length;
    const least = this.leastLength(entry);
    if (length === 0) return;
    if (length < least || length > most)
      throw new Error(`cannot ${what} ${most} tokens to ${length}: it can be 0, or ${least} to ${most}`);
    if (this.#states.some((group) => this.#stateAt(entry, group, length) === null))
      throw new Error(`cannot ${what} ${most} tokens to ${length}: no state was kept there`);
  }

  /** The node at the end of the whole pages of the first `length` tokens. */
  #nodeAt(entry: Entry, length: number): Node {
    let { node } = entry;
    const full = Math.floor(entry.tokens.length / this.pageSize);
    for (let i = Math.floor(length / this.pageSize); i < full; i++) node = node.parent ?? node;
    return node;
  }

  /** The page with the state behind the first `length` tokens, above 0; null if it is gone. */
  #stateAt(entry: Entry, group: number, length: number): number | null {
    if (length === entry.written) {
      const { first, pages } = heldOf(entry, group);
      return pages[Math.floor((length - 1) / this.#group(group).window.column) - first] ?? null;
    }
    return length % this.pageSize === 0 ? (this.#nodeAt(entry, length).pages[group] ?? null) : null;
  }

  /** The pages of a group that a sequence with the first `length` tokens holds. */
  #heldAt(entry: Entry, group: number, length: number): Entry["held"][number] {
    const { first, pages } = heldOf(entry, group);
    const { window } = this.#group(group);
    if (window.stride === null)
      return {
        first: length > 0 ? first : 0,
        pages: pages.slice(0, Math.max(window.columns(length) - first, 0)),
      };
    const page = length > 0 ? this.#stateAt(entry, group, length) : null;
    return { first: window.firstColumn(length), pages: page === null ? [] : [page] };
  }

  /**
   * Enters a full page for each group. Pages that the index knows already replace the sequence's own pages.
   */
  #publish(entry: Entry, column: number): void {
    const start = column * this.pageSize;
    const end = start + this.pageSize;
    const kept = entry.kept.get(end);
    const own = entry.held.map(({ first, pages }, group) => {
      const stride = this.#stride(group);
      if (stride === null) return pageAt(pages, column - first);
      return (end % stride === 0 ? pages[end / stride - 1 - first] : kept?.get(group)) ?? null;
    });
    const node = this.index.insert(entry.node, entry.tokens.slice(start, end), own);
    for (const [group, page] of own.entries()) {
      const known = node.pages[group] ?? page;
      if (page === null || known === null || known === page || kept?.has(group)) continue;
      this.#hold(group, known);
      const { pages } = heldOf(entry, group);
      pages[pages.indexOf(page)] = known;
      this.#drop(group, page);
    }
    this.#move(entry, node);
    if (!kept) return;
    this.#forgetKept(entry, end);
    // The newest border takes the place of the one before, except for the first border, the end of the prompt.
    for (const group of this.#states) {
      const page = entry.passing?.pages[group] ?? null;
      if (page !== null) this.index.demote(group, page);
    }
    entry.passing = entry.stored > 0 ? node : null;
    entry.stored += 1;
  }

  #stride(group: number): number | null {
    return this.groups[group]?.window.stride ?? null;
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
