"""Attention windows of the groups, in columns of the page table."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.sizes import pages_for


@dataclass(frozen=True)
class Window:
    """The positions that layers look at: a row at position p sees p − size + 1 … p; with size None, all up
    to p.

    A *column* is a place in a sequence's row of the page table: position p is in column p // column. It is a
    page of `page_size` positions; or, with a `stride`, a page that holds the state behind the last computed
    one of `stride` positions. Size 2 then means: a row reads the state behind the position before it.
    """

    size: int | None
    page_size: int
    stride: int | None = None

    @property
    def column(self) -> int:
        """Positions of a column."""
        return self.stride or self.page_size

    def columns(self, length: int) -> int:
        """Columns that `length` positions fill; the last one may be partly filled."""
        return pages_for(length, self.column)

    def first_column(self, position: int) -> int:
        """The first column that a row at this position reads, or any row after it."""
        return 0 if self.size is None else max(position - self.size + 1, 0) // self.column

    def columns_before(self, length: int) -> int:
        """The number of pages in the prefix index, up to `length` tokens (whole pages), that the next row
        reads.
        """
        return 1 if self.stride else length // self.page_size - self.first_column(length)

    def least_length(self, first: int) -> int:
        """The least length above 0 at which a sequence can continue that has lost the columns
        before `first`.
        """
        return 0 if self.size is None or first == 0 else first * self.column + self.size - 1

    def most_columns(self, rows: int, context: int) -> int:
        """The most pages that `rows` consecutive rows, within `context` positions, read, write and keep.

        They touch size − 1 + rows positions, which take one more column than they fill if they begin in the
        middle of one. Of states, one more page is kept at a border.
        """
        kept = 1 if self.stride else 0
        all_of_it = self.columns(context) + kept
        if self.size is None:
            return all_of_it
        return min(pages_for(self.size + rows - 2, self.column) + 1 + kept, all_of_it)

    def longest(self, pages: int, rows: int, context: int) -> int:
        """The most positions, up to `context`, of a sequence with `pages` pages and `rows` rows a step.

        If the pages do not hold a whole window, all positions must fit, as without a window.
        """
        return context if pages >= self.most_columns(rows, context) else pages * self.column
