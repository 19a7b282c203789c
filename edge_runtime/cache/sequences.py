"""Sequences of tokens and the pages that hold their keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearfar.edge_runtime.cache.pages import PageAllocator
from nearfar.edge_runtime.cache.prefix import PrefixIndex, root

Copy = tuple[int, int]
"""(from, to): the device must copy this page before the next step."""

NO_SLOT = -1
"""Slot of a sequence that never runs."""


@dataclass(eq=False)
class Sequence:
    """Tokens whose keys and values are in the cache (or will be, once the steps already queued have run).

    `pages` covers at least `tokens`; pages beyond are reserved for what comes next. Only sequences with the same `salt`
    share prefixes.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    salt: str = ""


class SequenceTable:
    """All sequences in flight: gives out slots and pages, shares prefixes, copies on write, evicts.

    Every operation that can run out of room either succeeds or changes nothing and returns None.
    """

    def __init__(self, pages: int, page_size: int, slots: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(pages)
        self.index = PrefixIndex(page_size)
        self.sequences: dict[int, Sequence] = {}
        self._slots = slots

    @property
    def available(self) -> int:
        """Pages that a reservation can get: the free ones and the evictable ones."""
        return self.allocator.free_count + self.index.idle_count

    @property
    def free_slots(self) -> int:
        """How many more sequences can be opened."""
        return self._slots - len(self.sequences)

    def pages_for(self, length: int) -> int:
        """Pages that `length` tokens fill, the last perhaps in part."""
        return -(-length // self.page_size)

    def open(self, tokens: Seq[int], salt: str = "") -> Sequence | None:
        """Open a sequence that will hold `tokens`, in the lowest free slot, starting from their longest cached prefix.

        At least one of the tokens is left to compute, because its logits are wanted. None when no slot is free.
        """
        slot = self._free_slot()
        if slot is None:
            return None
        pages = self.index.lookup(tokens, max(len(tokens) - 1, 0) // self.page_size, salt)
        for page in pages:
            self._hold(page)
        return self._add(slot, list(tokens[: len(pages) * self.page_size]), pages, salt)

    def borrow(self, tokens: Seq[int]) -> Sequence:
        """The longest cached prefix of `tokens`, whole pages of it, as a sequence without a slot: it holds pages, but never runs.

        For who reads or fills pages from outside (snapshots). `truncate` to 0 gives everything back. Python only.
        """
        pages = self.index.lookup(tokens, len(tokens) // self.page_size)
        for page in pages:
            self._hold(page)
        return Sequence(NO_SLOT, list(tokens[: len(pages) * self.page_size]), pages)

    def reserve(self, sequence: Sequence, length: int) -> list[Copy] | None:
        """Make the positions from the end of the sequence up to `length` writable.

        Returns the page copies to make first: a last page that others can see is copied before it is written.
        None when there are not enough pages.
        """
        shared = self._shared_tail(sequence, length)
        missing = max(self.pages_for(length) - len(sequence.pages), 0)
        if missing + (shared is not None) > self.available:
            return None
        copies: list[Copy] = []
        if shared is not None:
            old, new = sequence.pages[shared], self._take()
            sequence.pages[shared] = new
            self._drop(old)
            copies.append((old, new))
        sequence.pages.extend(self._take() for _ in range(missing))
        return copies

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Record tokens in reserved positions. Pages that became full enter the prefix index.

        Where the index knows a page with the same content, the sequence takes that page and gives its own back.
        """
        first = len(sequence.tokens) // self.page_size
        new = list(tokens)
        if len(sequence.tokens) + len(new) > len(sequence.pages) * self.page_size:
            raise ValueError(f"{len(new)} tokens do not fit {len(sequence.pages)} pages: reserve before append")
        sequence.tokens.extend(new)
        for index in range(first, len(sequence.tokens) // self.page_size):
            self._publish(sequence, index)

    def fork(self, sequence: Sequence) -> Sequence | None:
        """A second sequence with the same tokens, sharing all their pages. None when no slot is free."""
        slot = self._free_slot()
        if slot is None:
            return None
        pages = sequence.pages[: self.pages_for(len(sequence.tokens))]
        for page in pages:
            self._hold(page)
        return self._add(slot, list(sequence.tokens), pages, sequence.salt)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens; give back the pages beyond them, last first."""
        if not 0 <= length <= len(sequence.tokens):
            raise ValueError(f"cannot truncate {len(sequence.tokens)} tokens to {length}")
        del sequence.tokens[length:]
        keep = self.pages_for(length)
        while len(sequence.pages) > keep:
            self._drop(sequence.pages.pop())

    def release(self, sequence: Sequence) -> None:
        """Close the sequence. Its full pages stay in the prefix index until they are evicted."""
        while sequence.pages:
            self._drop(sequence.pages.pop())
        del self.sequences[sequence.slot]

    def clear(self) -> int:
        """Evict every idle page; returns how many."""
        count = self.index.idle_count
        for _ in range(count):
            self.allocator.free(self.index.evict())
        return count

    def forget(self) -> None:
        """What the pages held is gone: no prefix is found any more. Pages that sequences hold stay theirs."""
        self.clear()
        self.index.clear()

    def _free_slot(self) -> int | None:
        return next((slot for slot in range(self._slots) if slot not in self.sequences), None)

    def _add(self, slot: int, tokens: list[int], pages: list[int], salt: str) -> Sequence:
        sequence = self.sequences[slot] = Sequence(slot, tokens, pages, salt)
        return sequence

    def _shared_tail(self, sequence: Sequence, length: int) -> int | None:
        """Index of the page to be written next if it is partly filled and somebody else can see it."""
        index, filled = divmod(len(sequence.tokens), self.page_size)
        if filled == 0 or length <= len(sequence.tokens):
            return None
        page = sequence.pages[index]
        return index if self.allocator.refs[page] > 1 or page in self.index else None

    def _publish(self, sequence: Sequence, index: int) -> None:
        page = sequence.pages[index]
        start = index * self.page_size
        parent = sequence.pages[index - 1] if index else root(sequence.salt)
        known = self.index.insert(parent, sequence.tokens[start : start + self.page_size], page)
        if known != page:
            self._hold(known)
            sequence.pages[index] = known
            self._drop(page)

    def _take(self) -> int:
        if not self.allocator.free_count:
            self.allocator.free(self.index.evict())
        return self.allocator.take()

    def _hold(self, page: int) -> None:
        self.index.revive(page)
        self.allocator.retain(page)

    def _drop(self, page: int) -> None:
        if self.allocator.release(page):
            return
        if page in self.index:
            self.index.park(page)
        else:
            self.allocator.free(page)
