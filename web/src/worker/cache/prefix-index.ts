import type { Window } from "./window.js";

/**
 * One page of tokens behind the tokens of the node's parents, and for each group the page that holds their
 * keys and values.
 *
 * The path from the root names every token before this node too, so the content of a node's pages follows
 * from its path. A node lives as long as it has a page or a child, or as long as the tokens of a sequence end
 * at it (`ends` counts these sequences).
 */
export class Node {
  readonly pages: (number | null)[];
  readonly children = new Map<string, Node>();
  ends = 0;

  constructor(
    readonly parent: Node | null,
    readonly tokens: readonly number[],
    groups: number,
  ) {
    this.pages = new Array<number | null>(groups).fill(null);
  }
}

/**
 * A page of a state belongs to the node whose tokens it is the state behind: prefixes of its group begin at such
 * nodes, the *borders*, alone.
 *
 * A tree of full pages. A prefix is found where every group can serve it: a group without a window must have
 * all of its pages, one with a window those that the next row reads. So pages of a windowed group may leave
 * the index before those behind them do. In a group without a window a page never leaves before its children:
 * whoever holds a child holds its parent, sequences give pages back last page first, and the idle page given
 * back first is evicted first.
 */
export class PrefixIndex {
  readonly root: Node;
  readonly #windows: readonly Window[];
  readonly #pageSize: number;
  readonly #nodes: readonly Map<number, Node>[];
  /** By group; insertion order is eviction order. */
  readonly #idle: Set<number>[];

  constructor(windows: readonly Window[], pageSize: number) {
    this.#windows = windows;
    this.#pageSize = pageSize;
    this.#nodes = windows.map(() => new Map());
    this.#idle = windows.map(() => new Set());
    this.root = new Node(null, [], windows.length);
  }

  has(group: number, page: number): boolean {
    return this.#nodes[group]?.has(page) ?? false;
  }

  /** The number of pages of a group that `evict` can give back. */
  idleCount(group: number): number {
    return this.#idle[group]?.size ?? 0;
  }

  /** The idle pages of a group in eviction order. */
  idlePages(group: number): number[] {
    return [...(this.#idle[group] ?? [])];
  }

  /** Every node that has a page, with the tokens from the root to it; parents come before children. */
  nodes(): { path: number[]; node: Node }[] {
    const found: { path: number[]; node: Node }[] = [];
    const reached: { path: number[]; node: Node }[] = [{ path: [], node: this.root }];
    for (let next = reached.pop(); next; next = reached.pop()) {
      const { path, node } = next;
      if (node.pages.some((page) => page !== null)) found.push(next);
      for (const child of node.children.values())
        reached.push({ path: [...path, ...child.tokens], node: child });
    }
    return found;
  }

  /** The nodes of the longest prefix of `tokens` that every group can serve, at most `limit` of them. */
  lookup(tokens: readonly number[], limit: number): Node[] {
    const found: Node[] = [];
    let served = 0;
    // For each group, the number of pages without a gap at the end of `found`.
    const cached = this.#windows.map(() => 0);
    let node: Node | undefined = this.root;
    for (let end = this.#pageSize; found.length < limit; end += this.#pageSize) {
      node = node.children.get(keyOf(tokens.slice(end - this.#pageSize, end)));
      if (!node) break;
      found.push(node);
      const { pages } = node;
      this.#windows.forEach((_, group) => {
        cached[group] = pages[group] === null ? 0 : (cached[group] ?? 0) + 1;
      });
      if (this.#windows.every((window, group) => (cached[group] ?? 0) >= window.columnsBefore(end)))
        served = found.length;
    }
    return found.slice(0, served);
  }

  /**
   * Enters a full page for each group that has one. A page that was entered earlier stays; the node's `pages`
   * show which ones the index has.
   */
  insert(parent: Node, tokens: readonly number[], pages: readonly (number | null)[]): Node {
    const key = keyOf(tokens);
    let node = parent.children.get(key);
    if (!node) {
      node = new Node(parent, tokens, pages.length);
      parent.children.set(key, node);
    }
    for (const [group, page] of pages.entries()) {
      if (page === null || node.pages[group] !== null) continue;
      node.pages[group] = page;
      this.#nodes[group]?.set(page, node);
    }
    return node;
  }

  /** Counts one more sequence whose tokens end at this node. */
  enter(node: Node): Node {
    node.ends += 1;
    return node;
  }

  /** Counts one sequence fewer whose tokens end at this node. */
  leave(node: Node): void {
    node.ends -= 1;
    prune(node);
  }

  /** Records that the page has no holder any more: it may be evicted, after the pages parked before it. */
  park(group: number, page: number): void {
    this.#idle[group]?.add(page);
  }

  /** Records that the page is held again. */
  revive(group: number, page: number): void {
    this.#idle[group]?.delete(page);
  }

  /** An idle page will be evicted before all others of its group. */
  demote(group: number, page: number): void {
    const idle = this.#idle[group];
    if (idle?.delete(page)) this.#idle[group] = new Set([page, ...idle]);
  }

  /** Forgets a page that a sequence holds: its content is about to change. */
  withdraw(group: number, page: number): void {
    const node = this.#nodes[group]?.get(page);
    if (!node) return;
    this.#nodes[group]?.delete(page);
    node.pages[group] = null;
    prune(node);
  }

  /**
   * Removes the page of a group that has been idle longest, and returns it. The caller has checked
   * `idleCount`.
   */
  evict(group: number): number {
    const [page] = this.#idle[group] ?? [];
    const node = page === undefined ? undefined : this.#nodes[group]?.get(page);
    if (page === undefined || !node) throw new Error("evict() without an idle page");
    this.#idle[group]?.delete(page);
    this.#nodes[group]?.delete(page);
    node.pages[group] = null;
    prune(node);
    return page;
  }
}

/** Removes a node that nothing needs any more, and its parents that only led to it. */
function prune(leaf: Node): void {
  let node = leaf;
  while (
    node.parent &&
    node.ends === 0 &&
    node.children.size === 0 &&
    node.pages.every((page) => page === null)
  ) {
    node.parent.children.delete(keyOf(node.tokens));
    node = node.parent;
  }
}

function keyOf(tokens: readonly number[]): string {
  return tokens.join(",");
}
