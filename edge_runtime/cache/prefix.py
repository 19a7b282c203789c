"""Which token prefixes are in the cache already, and which of their pages goes first when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence as Seq

ROOT = -1
"""Parent of the first page of a sequence without a salt."""

Parent = int | str
"""A page, ROOT, or the salt of a tenant: the root of a tree of its own, from which nobody else's pages are reached."""
Key = tuple[Parent, tuple[int, ...]]


def root(salt: str) -> Parent:
    """Parent of the first page of a sequence with this salt."""
    return salt or ROOT


def common_length(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common beginning of two sequences of tokens."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class PrefixIndex:
    """A tree of full pages: a page is found by its parent page and the tokens in it.

    The path from the root names every token before the page too, so equal keys mean equal content.
    A page number can stand for its whole path because a page never leaves the index before its children do:
    whoever holds a child holds its parent, sequences give pages back last page first, and the idle page
    given back first is evicted first.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._idle: dict[int, None] = {}  # insertion order is eviction order

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    @property
    def idle_count(self) -> int:
        """How many pages `evict` can give back."""
        return len(self._idle)

    def idle_pages(self) -> list[int]:
        """The idle pages in the order in which they will be evicted."""
        return list(self._idle)

    def entries(self) -> list[tuple[int, Parent, list[int]]]:
        """(page, parent, tokens) of every page, by page number."""
        return [(page, key[0], list(key[1])) for page, key in sorted(self._keys.items())]

    def lookup(self, tokens: Seq[int], limit: int, salt: str = "") -> list[int]:
        """The pages of the longest cached prefix of `tokens` in the salt's tree, at most `limit` pages."""
        found: list[int] = []
        parent = root(salt)
        for index in range(limit):
            start = index * self.page_size
            page = self._pages.get((parent, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def insert(self, parent: Parent, tokens: Seq[int], page: int) -> int:
        """Enter a full page. Returns the page that holds these tokens: `page`, or the one that was there first."""
        key = (parent, tuple(tokens))
        known = self._pages.setdefault(key, page)
        if known == page:
            self._keys[page] = key
        return known

    def park(self, page: int) -> None:
        """Nobody holds the page any more: it may be evicted, after those parked before it."""
        self._idle[page] = None

    def revive(self, page: int) -> None:
        """The page is held again."""
        self._idle.pop(page, None)

    def clear(self) -> None:
        """Forget every page. The caller has evicted the idle ones; the others are freed when they are released."""
        self._pages.clear()
        self._keys.clear()

    def evict(self) -> int:
        """Forget the page that has been idle longest, and return it. The caller has checked `idle_count`."""
        page = next(iter(self._idle))
        del self._idle[page]
        del self._pages[self._keys.pop(page)]
        return page
