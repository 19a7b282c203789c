/** Parent of the first page of a sequence. */
export const ROOT = -1;

interface Entry {
  readonly key: string;
  readonly parent: number;
  readonly tokens: readonly number[];
}

/**
 * A tree of full pages: a page is found by its parent page and the tokens in it.
 *
 * The path from the root names every token before the page too, so equal keys mean equal content. A page number can
 * stand for its whole path because a page never leaves the index before its children do: whoever holds a child holds
 * its parent, sequences give pages back last page first, and the idle page given back first is evicted first.
 */
export class PrefixIndex {
  readonly #pages = new Map<string, number>();
  readonly #entries = new Map<number, Entry>();
  /** Insertion order is eviction order. */
  readonly #idle = new Set<number>();

  constructor(readonly pageSize: number) {}

  has(page: number): boolean {
    return this.#entries.has(page);
  }

  /** How many pages `evict` can give back. */
  get idleCount(): number {
    return this.#idle.size;
  }

  /** The idle pages in the order in which they will be evicted. */
  idlePages(): number[] {
    return [...this.#idle];
  }

  /** [page, parent, tokens] of every page, by page number. */
  entries(): [number, number, readonly number[]][] {
    const sorted = [...this.#entries].sort(([a], [b]) => a - b);
    return sorted.map(([page, { parent, tokens }]) => [page, parent, tokens]);
  }

  /** The pages of the longest cached prefix of `tokens`, at most `limit` pages. */
  lookup(tokens: readonly number[], limit: number): number[] {
    const found: number[] = [];
    let parent = ROOT;
    for (let start = 0; found.length < limit; start += this.pageSize) {
      const page = this.#pages.get(keyOf(parent, tokens.slice(start, start + this.pageSize)));
      if (page === undefined) break;
      found.push(page);
      parent = page;
    }
    return found;
  }

  /** Enters a full page. Returns the page that holds these tokens: `page`, or the one that was there first. */
  insert(parent: number, tokens: readonly number[], page: number): number {
    const key = keyOf(parent, tokens);
    const known = this.#pages.get(key);
    if (known !== undefined) return known;
    this.#pages.set(key, page);
    this.#entries.set(page, { key, parent, tokens });
    return page;
  }

  /** Nobody holds the page any more: it may be evicted, after those parked before it. */
  park(page: number): void {
    this.#idle.add(page);
  }

  /** The page is held again. */
  revive(page: number): void {
    this.#idle.delete(page);
  }

  /** Forgets the page that has been idle longest, and returns it. The caller has checked `idleCount`. */
  evict(): number {
    const [page] = this.#idle;
    const entry = page === undefined ? undefined : this.#entries.get(page);
    if (page === undefined || !entry) throw new Error("evict() without an idle page");
    this.#idle.delete(page);
    this.#entries.delete(page);
    this.#pages.delete(entry.key);
    return page;
  }
}

function keyOf(parent: number, tokens: readonly number[]): string {
  return `${parent}:${tokens.join(",")}`;
}
