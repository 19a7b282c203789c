/**
 * How far back the layers of a group look: a row at position p attends to p − size + 1 … p, or to every
 * position before.
 *
 * A *column* is a place in a sequence's row of the page table: position p is in column p / pageSize, rounded
 * down.
 */
export class Window {
  constructor(
    readonly size: number | null,
    readonly pageSize: number,
  ) {}

  /** The first column that a row at this position, or any row after it, reads. */
  firstColumn(position: number): number {
    return this.size === null ? 0 : Math.floor(Math.max(position - this.size + 1, 0) / this.pageSize);
  }

  /** The number of the full columns of `length` tokens that the next row reads. */
  columnsBefore(length: number): number {
    return length / this.pageSize - this.firstColumn(length);
  }

  /** The least length above 0 at which a sequence that has lost the columns before `first` can continue. */
  leastLength(first: number): number {
    return this.size === null || first === 0 ? 0 : first * this.pageSize + this.size - 1;
  }

  /**
   * The most columns that `rows` consecutive rows of a sequence of at most `context` positions read and
   * write, wherever they lie. The rows touch size − 1 + rows positions, which take one more column than they
   * fill if they begin in the middle of a column.
   */
  mostColumns(rows: number, context: number): number {
    const whole = Math.ceil(context / this.pageSize);
    return this.size === null
      ? whole
      : Math.min(Math.ceil((this.size + rows - 2) / this.pageSize) + 1, whole);
  }

  /**
   * The number of positions, at most `context`, that a sequence with `pages` pages can have if it advances by
   * `rows` positions a step. Pages that do not even hold a window count as without a window: all positions
   * must fit into them.
   */
  longest(pages: number, rows: number, context: number): number {
    return pages >= this.mostColumns(rows, context) ? context : pages * this.pageSize;
  }
}
