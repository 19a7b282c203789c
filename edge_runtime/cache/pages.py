"""Free pages, and the number of sequences that hold each other page."""

from __future__ import annotations


class PageAllocator:
    """Pages 0…count-1, each with a reference count.

    A page is *free* (on the free list), *held* (its count is positive), or *idle*: no sequence holds it, but
    its content may be needed again. The last sequence that releases a page decides: `free` it, or leave it
    idle. The free list is a stack: a fresh allocator returns 0, 1, 2, …; after that, the page freed last is
    returned first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.refs = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """The number of pages that `take` can still return."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """The free pages in the order in which `take` will return them."""
        return self._free[::-1]

    def take(self) -> int:
        """Take a free page and hold it once. The caller has checked `free_count`."""
        page = self._free.pop()
        self.refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a holder to a held or idle page."""
        self.refs[page] += 1

    def release(self, page: int) -> int:
        """Remove a holder and return how many are left. At 0 the page is idle."""
        if self.refs[page] <= 0:
            raise ValueError(f"page {page} is released more often than it was taken")
        self.refs[page] -= 1
        return self.refs[page]

    def free(self, page: int) -> None:
        """Put an idle page on the free list."""
        if self.refs[page] != 0:
            raise ValueError(f"page {page} is still held by {self.refs[page]} sequences")
        self._free.append(page)
