"""How far back the layers of a group look, in columns of the page table."""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.sizes import pages_for


@dataclass(frozen=True)
class Window:
    """What layers attend to: a row at position p to p − size + 1 … p; with size None, to every position
    before.

    A *column* is a place in a sequence's row of the page table: that of a position is position // page_size.
    """

    size: int | None
    page_size: int

    def first_column(self, position: int) -> int:
        """The first column that a row at this position reads, or any row after it."""
        return 0 if self.size is None else max(position - self.size + 1, 0) // self.page_size

    def columns_before(self, length: int) -> int:
        """How many of the full columns of `length` tokens, whole pages of them, the next row reads."""
        return length // self.page_size - self.first_column(length)

    def least_length(self, first: int) -> int:
        """The least length, but 0, at which a sequence can go on that has lost the columns before `first`."""
        return 0 if self.size is None or first == 0 else first * self.page_size + self.size - 1

    def most_columns(self, rows: int, context: int) -> int:
        """Columns that `rows` consecutive rows, of at most `context` positions, read and write, wherever they
        lie.

        They touch size − 1 + rows positions, which lie in one column more than they fill where they begin in
        the middle.
        """
        all_of_it = pages_for(context, self.page_size)
        if self.size is None:
            return all_of_it
        return min(pages_for(self.size + rows - 2, self.page_size) + 1, all_of_it)

    def longest(self, pages: int, rows: int, context: int) -> int:
        """Positions, at most `context`, that a sequence with `pages` pages can have, `rows` of them in a
        step.

        Where the pages do not even hold a window, it is as if there were none: all positions must fit.
        """
        return context if pages >= self.most_columns(rows, context) else pages * self.page_size
