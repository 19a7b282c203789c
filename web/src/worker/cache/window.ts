/**
 * How far back the layers of a group look: a row at position p attends to p − size + 1 … p, or to every
 * position before.
 *
 * A *column* is a place in a sequence's row of the page table: that of a position is position / pageSize,
 * rounded down.
 */
export class Window {
  constructor(
    readonly size: number | null,
    readonly pageSize: number,
  ) {}

  /** The first column that a row at this position reads, or any row after it. */
  firstColumn(position: number): number {
    return this.size === null ? 0 : Math.floor(Math.max(position - this.size + 1, 0) / this.pageSize);
  }

  /** How many of the full columns of `length` tokens, whole pages of them, the next row reads. */
  columnsBefore(length: number): number {
    return length / this.pageSize - this.firstColumn(length);
  }

  /** The least length, but 0, at which a sequence can go on that has lost the columns before `first`. */
  leastLength(first: number): number {
    return this.size === null || first === 0 ? 0 : first * this.pageSize + this.size - 1;
  }

  /**
   * Columns that `rows` consecutive rows of a sequence of at most `context` positions read and write,
   * wherever they lie: size − 1 + rows positions, which lie in one column more than they fill where they
   * begin in the middle.
   */
  mostColumns(rows: number, context: number): number {
    const whole = Math.ceil(context / this.pageSize);
    return this.size === null
      ? whole
      : Math.min(Math.ceil((this.size + rows - 2) / this.pageSize) + 1, whole);
  }

  /**
   * Positions, at most `context`, that a sequence with `pages` pages can have if it advances by `rows` a
   * step. Where the pages do not even hold a window, it is as if there were none: all positions must fit.
   */
  longest(pages: number, rows: number, context: number): number {
    return pages >= this.mostColumns(rows, context) ? context : pages * this.pageSize;
  }
}
