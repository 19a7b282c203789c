/**
 * How far back the layers of a group look: a row at position p attends to p − size + 1 … p, or to every
 * position before.
 *
 * A *column* is a place in a sequence's row of the page table: that of a position is position / column,
 * rounded down. It is a page of `pageSize` positions; or, with a `stride`, a page that holds the state behind
 * the last of `stride` positions that was computed. Size 2 then means: a row reads the state behind the
 * position before it.
 */
export class Window {
  constructor(
    readonly size: number | null,
    readonly pageSize: number,
    readonly stride: number | null = null,
  ) {}

  /** Positions of a column. */
  get column(): number {
    return this.stride ?? this.pageSize;
  }

  /** Columns that `length` positions fill, the last perhaps in part. */
  columns(length: number): number {
    return Math.ceil(length / this.column);
  }

  /** The first column that a row at this position reads, or any row after it. */
  firstColumn(position: number): number {
    return this.size === null ? 0 : Math.floor(Math.max(position - this.size + 1, 0) / this.column);
  }

  /** How many pages of the prefix index, up to `length` tokens, whole pages of them, the next row reads. */
  columnsBefore(length: number): number {
    return this.stride === null ? length / this.pageSize - this.firstColumn(length) : 1;
  }

  /** The least length above 0 at which a sequence that has lost the columns before `first` can continue. */
  leastLength(first: number): number {
    return this.size === null || first === 0 ? 0 : first * this.column + this.size - 1;
  }

  /**
   * Pages that `rows` consecutive rows of a sequence of at most `context` positions read, write and keep,
   * wherever they lie: size − 1 + rows positions, which lie in one column more than they fill where they
   * begin in the middle. Of states, one more page is kept at a border.
   */
  mostColumns(rows: number, context: number): number {
    const kept = this.stride === null ? 0 : 1;
    const whole = this.columns(context) + kept;
    return this.size === null ? whole : Math.min(this.columns(this.size + rows - 2) + 1 + kept, whole);
  }

  /**
   * The number of positions, at most `context`, that a sequence with `pages` pages can have if it advances by
   * `rows` positions a step. Pages that do not even hold a window count as without a window: all positions
   * must fit into them.
   */
  longest(pages: number, rows: number, context: number): number {
    return pages >= this.mostColumns(rows, context) ? context : pages * this.column;
  }
}
