"""Attention windows of the groups, in columns of the page table."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.sizes import pages_for


@dataclass(frozen=True)
class Window:
    """The positions that layers attend to: a row at position p sees p − size + 1 … p; with size None, all up
    to p.

    A *column* is a place in a sequence's row of the page table: position p is in column p // page_size.
    """

    size: int | None
    page_size: int

    def first_column(self, position: int) -> int:
        """The first column that a row at this position reads, or any row after it."""
        return 0 if self.size is None else max(position - self.size + 1, 0) // self.page_size

    def columns_before(self, length: int) -> int:
        """The number of full columns of `length` tokens (whole pages) that the next row reads."""
        return length // self.page_size - self.first_column(length)

    def least_length(self, first: int) -> int:
        """The least length above 0 at which a sequence can continue that has lost the columns
        before `first`.
        """
        return 0 if self.size is None or first == 0 else first * self.page_size + self.size - 1

    def most_columns(self, rows: int, context: int) -> int:
        """The most columns that `rows` consecutive rows, within `context` positions, read and write.

        They touch size − 1 + rows positions, which take one more column than they fill if they begin in the
        middle of one.
        """
        all_of_it = pages_for(context, self.page_size)
        if self.size is None:
            return all_of_it
        return min(pages_for(self.size + rows - 2, self.page_size) + 1, all_of_it)

    def longest(self, pages: int, rows: int, context: int) -> int:
        """The most positions, up to `context`, of a sequence with `pages` pages and `rows` rows a step.

        If the pages do not hold a whole window, all positions must fit, as without a window.
        """
        return context if pages >= self.most_columns(rows, context) else pages * self.page_size
