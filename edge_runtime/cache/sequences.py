"""Sequences of tokens and the pages that hold their keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearfar.edge_runtime.cache.pages import PageAllocator
from nearfar.edge_runtime.cache.prefix import Node, PrefixIndex
from nearfar.edge_runtime.cache.windows import Window
from nearfar.format.sizes import pages_for

Copy = tuple[int, int, int]
"""(group, from, to): a page that the device must copy before the next step."""

NO_SLOT = -1
"""Slot number of a sequence that never runs."""


@dataclass
class HeldPages:
    """The pages of one group that a sequence holds, for the columns `first` to `end` of its page table."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The column after the last one."""
        return self.first + len(self.pages)


@dataclass(eq=False)
class Sequence:
    """Tokens whose keys and values are in the cache, or will be once the queued steps have run.

    `written`: positions that the device was given, known or not; of states only the newest is held, the one
    behind them. `kept`: states behind fewer positions, by their number, that will enter the prefix index:
    (group, page).

    `held`, by group, covers at least what rows from `computed` on read of `tokens`; later pages are reserved
    for new tokens. The first `computed` tokens are known to be in the cache: other sequences may share them,
    and their full pages are in the prefix index, where they end at `node`. Only sequences with the same
    `salt` share pages.
    """

    slot: int
    tokens: list[int]
    held: list[HeldPages]
    node: Node
    salt: str = ""
    computed: int = 0
    written: int = 0
    kept: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    stored: int = 0
    """The number of states that were kept."""
    passing: Node | None = None
    """The newest border, unless it is the first: the next one takes its place."""

    @property
    def pages(self) -> list[int]:
        """The pages of group 0, one for each column if the group has no window."""
        return self.held[0].pages


class SequenceTable:
    """All sequences in flight: assigns slots and pages, shares prefixes, copies on write, evicts.

    Layers with the same window are a *group* with a pool of pages of its own. In a group without a window a
    sequence keeps all its pages. In a group with a window it keeps the pages that its rows still read: when
    the last step that needs a page has been read, the page is released and stays in the prefix index while
    there is room. An operation that can run out of room either succeeds, or changes nothing and returns None.
    """

    def __init__(
        self,
        pages: int | Seq[int],
        page_size: int,
        slots: int,
        windows: Seq[int | None] = (None,),
        strides: Seq[int | None] | None = None,
    ) -> None:
        """Give `pages`, `windows` (in positions, None: no window) and `strides` (of states, None: none) by
        group; a single number of pages means one group.
        """
        self.page_size = page_size
        every = zip(windows, strides or [None] * len(windows), strict=True)
        self.windows = tuple(Window(size, page_size, stride) for size, stride in every)
        self._states = [group for group, w in enumerate(self.windows) if w.stride]
        self._sliding = [(group, w) for group, w in enumerate(self.windows) if w.size is not None]
        counts = (pages,) if isinstance(pages, int) else tuple(pages)
        if len(counts) != len(self.windows):
            raise ValueError(f"{len(counts)} numbers of pages for {len(self.windows)} groups")
        self.allocators = tuple(PageAllocator(count) for count in counts)
        self.index = PrefixIndex(self.windows)
        self.sequences: dict[int, Sequence] = {}
        self.freed = 0
        """Counts released pages and slots: while it stays the same, a request that found no
        room finds none.
        """
        self._slots = slots

    @property
    def available(self) -> int:
        """Pages that a reservation can get, free or evictable, in the group with the fewest."""
        return min(self.available_in(group) for group in range(len(self.windows)))

    def available_in(self, group: int) -> int:
        """Pages of a group that are free, or that only the prefix index holds."""
        return self.allocators[group].free_count + self.index.idle_count(group)

    @property
    def free_slots(self) -> int:
        """The number of further sequences that can be opened."""
        return self._slots - len(self.sequences)

    def longest(self, rows: int, context: int) -> int:
        """The most positions, up to `context`, of a sequence that advances by up to `rows` a step and has the
        whole cache for itself.
        """
        return self._longest(rows, context, [allocator.count for allocator in self.allocators])

    def longest_now(self, rows: int, context: int, without: Seq[Sequence] = ()) -> int:
        """The longest sequence in the pages that no sequence holds, or only those in `without`."""
        counts = [self.available_in(g) + self._held_alone(g, without) for g in range(len(self.windows))]
        return self._longest(rows, context, counts)

    def _longest(self, rows: int, context: int, counts: Seq[int]) -> int:
        return min(w.longest(count, rows, context) for w, count in zip(self.windows, counts, strict=True))

    def _held_alone(self, group: int, sequences: Seq[Sequence]) -> int:
        """The number of a group's pages that these sequences hold and no other does."""
        held = Counter(page for sequence in sequences for page in sequence.held[group].pages)
        refs = self.allocators[group].refs
        return sum(refs[page] == count for page, count in held.items())

    def pages_for(self, length: int) -> int:
        """Pages that `length` tokens fill; the last page may be partly filled."""
        return pages_for(length, self.page_size)

    def open(self, tokens: Seq[int], salt: str = "") -> Sequence | None:
        """Open a sequence that will hold `tokens`, in the lowest free slot, starting from the longest cached
        prefix.

        At least one of the tokens is left to compute, because its logits are needed. None if no slot is free.
        """
        slot = self._free_slot()
        if slot is None:
            return None
        sequence = self.sequences[slot] = self._found(
            slot, tokens, max(len(tokens) - 1, 0) // self.page_size, salt
        )
        return sequence

    def borrow(self, tokens: Seq[int]) -> Sequence:
        """Return the longest cached prefix of `tokens`, in whole pages, as a sequence without a slot.

        It holds pages, but never runs: snapshots read and fill pages through it. Python only.
        """
        return self._found(NO_SLOT, tokens, len(tokens) // self.page_size, "")

    def reserve(self, sequence: Sequence, length: int, soon: int | None = None) -> list[Copy] | None:
        """Make the positions up to `length` writable; in groups with a window, up to `soon` (default
        `length`).

        A group with a window releases pages as the sequence advances, and gets the next pages then. Returns
        the page copies to make first: a last page that others can see is copied before it is written. None if
        there are not enough pages.
        """
        needs: list[tuple[int, int, bool]] = []
        for group, held in enumerate(sequence.held):
            window = self.windows[group]
            until = length if soon is None or window.size is None else min(soon, length)
            shared = self._shared_tail(sequence, group, until)
            missing = max(window.columns(until) - held.end, 0)
            if missing or shared:
                if missing + shared > self.available_in(group):
                    if missing > self.available_in(group) or not self._own_tail(sequence, group):
                        return None
                    self._give_up_border(sequence, group)
                    shared = False
                needs.append((group, missing, shared))
        copies: list[Copy] = []
        for group, missing, shared in needs:
            held = sequence.held[group]
            if shared:
                column = sequence.written // self.windows[group].column - held.first
                old, new = held.pages[column], self._take(group)
                held.pages[column] = new
                self._drop(group, old)
                copies.append((group, old, new))
            held.pages.extend(self._take(group) for _ in range(missing))
        return copies

    def reservable(self, sequence: Sequence, length: int) -> int:
        """The greatest length, up to `length`, that `reserve` would accept now."""
        for group, held in enumerate(sequence.held):
            column, spare = self.windows[group].column, self.available_in(group)
            if self._shared_tail(sequence, group, length) and not self._own_tail(sequence, group):
                spare -= 1
            length = min(length, (held.end + spare) * column if spare >= 0 else len(sequence.tokens))
        return length

    def writable(self, sequence: Sequence) -> int:
        """The length up to which every group has pages for the positions; with states, pages that nobody else
        sees.
        """
        if any(self._shared_tail(sequence, group, sequence.written + 1) for group in self._states):
            return sequence.written
        return min(held.end * w.column for held, w in zip(sequence.held, self.windows, strict=True))

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Record tokens in reserved positions. Other sequences cannot find them before they are published."""
        new = list(tokens)
        room = self.writable(sequence) - len(sequence.tokens)
        if len(new) > room:
            raise ValueError(f"{len(new)} tokens do not fit the {room} positions left: reserve before append")
        sequence.tokens.extend(new)
        self.advance(sequence, len(sequence.tokens))

    def advance(self, sequence: Sequence, length: int) -> None:
        """Record that the device was given the rows up to `length`, whether or not their tokens are known."""
        sequence.written = max(sequence.written, length)

    def border(self, length: int) -> int:
        """The last border before the end of `length` tokens: where a later sequence with the same beginning
        can start, if `keep` is called there. 0 if it can start at any page, because no group has states.
        """
        return max(length - 1, 0) // self.page_size * self.page_size if self._states else 0

    def keep(self, sequence: Sequence) -> None:
        """Keep the states behind the rows that the device was given, if these fill whole pages and the last
        row has not been read.

        The pages enter the prefix index when the rows have been read. The next row gets copies of them.
        """
        length = sequence.written
        if length <= sequence.computed or length % self.page_size or length in sequence.kept:
            return
        kept = [
            (group, sequence.held[group].pages[length // w.column - sequence.held[group].first])
            for group, w in enumerate(self.windows)
            if w.stride and length % w.stride  # at a multiple of the stride the next row takes a new page
        ]
        if kept:
            for group, page in kept:
                self._hold(group, page)
            sequence.kept[length] = kept

    def leaves(self, length: int, common: int) -> int:
        """How many of the first `common` tokens another sequence can take from one that will compute
        `length`.
        """
        for group in self._states:
            last, stride = self.border(length), self.windows[group].stride or 1
            common = last if last <= common else common // stride * stride
        return common

    def shareable(self, sequence: Sequence, most: int) -> int:
        """The greatest length, up to `most` and `computed`, at which a fork of the sequence can continue; 0
        if there is none.
        """
        most = min(most, sequence.computed)
        if not self._states or most == sequence.written:
            return most if most >= self.least_length(sequence) else 0
        for end in range(most // self.page_size * self.page_size, 0, -self.page_size):
            if end < self.least_length(sequence):
                break
            if all(self._state_at(sequence, group, end) is not None for group in self._states):
                return end
        return 0

    def publish(self, sequence: Sequence, length: int) -> None:
        """Record that the device has computed the first `length` tokens: their full pages enter the prefix
        index.

        If the index has a page with the same content, the sequence takes that page and releases its own. Rows
        that are still to be read are at `length` or after it: pages before all of their windows are released.
        """
        first, sequence.computed = (
            sequence.computed,
            max(sequence.computed, min(length, len(sequence.tokens))),
        )
        for column in range(first // self.page_size, sequence.computed // self.page_size):
            self._publish(sequence, column)
        self.slide(sequence, sequence.computed)

    def slide(self, sequence: Sequence, position: int) -> None:
        """Release the pages that no row from `position` on reads, first page first."""
        for group, window in self._sliding:
            held, first = sequence.held[group], window.first_column(position)
            if first > held.first:
                for page in held.pages[: first - held.first]:
                    self._drop(group, page)
                del held.pages[: first - held.first]
                held.first = first

    def least_length(self, sequence: Sequence) -> int:
        """The least length above 0 to which the sequence or its fork can be truncated; earlier pages were
        released.
        """
        return max(
            0 if window.stride else window.least_length(held.first)
            for window, held in zip(self.windows, sequence.held, strict=True)
        )

    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence | None:
        """Open a second sequence with the first `length` tokens (default: all that were computed), which
        shares their pages; None if no slot is free. `length`: 0, or a result of `shareable`.

        A page that is not published yet may still be replaced by another one with the same content, so no
        other sequence may hold it.
        """
        length = sequence.computed if length is None else length
        self._check_length(sequence, length, sequence.computed, "fork")
        slot = self._free_slot()
        if slot is None:
            return None
        held = [self._held_at(sequence, group, length) for group in range(len(self.windows))]
        node, tokens = self._node_at(sequence, length), sequence.tokens[:length]
        child = self.sequences[slot] = self._add(slot, tokens, held, node, sequence.salt)
        return child

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens, 0 or at least `least_length`; release the later pages, last page
        first. With states it can be 0, all that was written, or a border.
        """
        self._check_length(sequence, length, len(sequence.tokens), "truncate")
        back = [
            group for group in self._states if length != sequence.written
        ]  # whose state is an earlier one
        kept = [self._held_at(sequence, group, length) for group in back]
        for group, held in zip(back, kept, strict=True):
            for page in held.pages:
                self._hold(group, page)
        node = self._node_at(sequence, min(sequence.computed, length))
        self._move(sequence, node)
        del sequence.tokens[length:]
        for group, held in enumerate(sequence.held):
            keep = 0 if group in back else self.windows[group].columns(length)
            while held.pages and held.end > keep:
                self._drop(group, held.pages.pop())
            if length == 0:
                held.first = 0
        for group, held in zip(back, kept, strict=True):
            sequence.held[group] = held
        for end in [end for end in sequence.kept if end > length]:
            self._forget_kept(sequence, end)
        sequence.computed = min(sequence.computed, length)
        sequence.written = length

    def release(self, sequence: Sequence) -> None:
        """Close the sequence. Its published pages stay in the prefix index until they are evicted."""
        self.truncate(sequence, 0)
        self.index.leave(sequence.node)
        self.sequences.pop(sequence.slot, None)
        self.freed += 1

    def clear(self) -> int:
        """Evict every idle page; returns how many."""
        count = 0
        for group, allocator in enumerate(self.allocators):
            for _ in range(self.index.idle_count(group)):
                allocator.free(self.index.evict(group))
                count += 1
        return count

    def forget(self) -> None:
        """Void the contents of all pages: no prefix is found any more. Sequences keep the pages that they
        hold.
        """
        self.clear()
        self.index.clear()

    def _free_slot(self) -> int | None:
        return next((slot for slot in range(self._slots) if slot not in self.sequences), None)

    def _found(self, slot: int, tokens: Seq[int], limit: int, salt: str) -> Sequence:
        """A sequence that starts with the longest cached prefix of `tokens`, at most `limit` pages."""
        path = self.index.lookup(tokens, limit, salt)
        length = len(path) * self.page_size
        every = []
        for group, window in enumerate(self.windows):
            first = window.first_column(length)
            read = path[-1:] if window.stride else path[first:]
            every.append(HeldPages(first, [page for node in read if (page := node.pages[group]) is not None]))
        return self._add(
            slot, list(tokens[:length]), every, path[-1] if path else self.index.root(salt), salt
        )

    def _add(self, slot: int, tokens: list[int], held: list[HeldPages], node: Node, salt: str) -> Sequence:
        for group, each in enumerate(held):
            for page in each.pages:
                self._hold(group, page)
        length = len(tokens)
        return Sequence(slot, tokens, held, self.index.enter(node), salt, length, length)

    def _tail(self, sequence: Sequence, group: int) -> int | None:
        """The page of the column that the next row continues; None if the row begins a column."""
        column, filled = divmod(sequence.written, self.windows[group].column)
        held = sequence.held[group]
        return held.pages[column - held.first] if filled and column >= held.first else None

    def _shared_tail(self, sequence: Sequence, group: int, length: int) -> bool:
        """Whether the next page to be written is partly filled and another sequence can see it."""
        page = self._tail(sequence, group) if length > sequence.written else None
        if page is None:
            return False
        return self.allocators[group].refs[page] > 1 or (group, page) in self.index

    def _own_tail(self, sequence: Sequence, group: int) -> bool:
        """Whether the sequence can write its shared tail in place, if it gives up the border there."""
        page = self._tail(sequence, group)
        kept = (group, page) in sequence.kept.get(sequence.written, ())
        return (
            bool(self.windows[group].stride)
            and page is not None
            and self.allocators[group].refs[page] == 1 + kept
        )

    def _give_up_border(self, sequence: Sequence, group: int) -> None:
        """Make the tail the sequence's own: its state is lost to others."""
        self._forget_kept(sequence, sequence.written)
        page = self._tail(sequence, group)
        if page is not None and (group, page) in self.index:
            self.index.withdraw(group, page)

    def _forget_kept(self, sequence: Sequence, length: int) -> None:
        for group, page in sequence.kept.pop(length, ()):
            self._drop(group, page)

    def _check_length(self, sequence: Sequence, length: int, most: int, what: str) -> None:
        """ValueError unless a sequence can continue at `length`."""
        least = self.least_length(sequence)
        if length and not least <= length <= most:
            raise ValueError(f"cannot {what} {most} tokens to {length}: it can be 0, or {least} to {most}")
        if length and any(self._state_at(sequence, group, length) is None for group in self._states):
            raise ValueError(f"cannot {what} {most} tokens to {length}: no state was kept there")

    def _node_at(self, sequence: Sequence, length: int) -> Node:
        """The node at the end of the whole pages of the first `length` tokens, which were computed."""
        node = sequence.node
        for _ in range(length // self.page_size, sequence.computed // self.page_size):
            assert node.parent is not None
            node = node.parent
        return node

    def _state_at(self, sequence: Sequence, group: int, length: int) -> int | None:
        """The page with the state behind the first `length` tokens, above 0; None if it is gone."""
        if length == sequence.written:
            held = sequence.held[group]
            return held.pages[(length - 1) // self.windows[group].column - held.first]
        if length % self.page_size or length > sequence.computed:
            return None
        return self._node_at(sequence, length).pages[group]

    def _held_at(self, sequence: Sequence, group: int, length: int) -> HeldPages:
        """The pages of a group that a sequence with the first `length` tokens holds."""
        held, window = sequence.held[group], self.windows[group]
        if not window.stride:
            return HeldPages(
                held.first if length else 0, held.pages[: max(window.columns(length) - held.first, 0)]
            )
        page = self._state_at(sequence, group, length) if length else None
        return HeldPages(window.first_column(length), [] if page is None else [page])

    def _publish(self, sequence: Sequence, column: int) -> None:
        """Enter a full page of each group that holds it into the index; a page that is already there replaces
        it.
        """
        start, end = column * self.page_size, (column + 1) * self.page_size
        kept = dict(sequence.kept.get(end, ()))
        own: list[int | None] = []
        for group, (held, window) in enumerate(zip(sequence.held, self.windows, strict=True)):
            full = (column if not window.stride else end // window.stride - 1) - held.first
            whole = not window.stride or end % window.stride == 0
            own.append(held.pages[full] if whole and full >= 0 else kept.get(group))
        node = self.index.insert(sequence.node, sequence.tokens[start:end], own)
        for group, (page, known) in enumerate(zip(own, node.pages, strict=True)):
            if page is not None and known is not None and known != page and group not in kept:
                held = sequence.held[group]
                self._hold(group, known)
                held.pages[held.pages.index(page)] = known
                self._drop(group, page)
        self._move(sequence, node)
        if kept:
            self._forget_kept(sequence, end)
            self._supersede(sequence, node)

    def _supersede(self, sequence: Sequence, node: Node) -> None:
        """Let the newest border take the place of the one before it, unless that is the sequence's first one:
        the end of its prompt.
        """
        for group, page in enumerate(sequence.passing.pages if sequence.passing else ()):
            if page is not None and self.windows[group].stride:
                self.index.demote(group, page)
        sequence.passing = node if sequence.stored else None
        sequence.stored += 1

    def _move(self, sequence: Sequence, node: Node) -> None:
        """Move the end of the sequence's published tokens to another node."""
        before, sequence.node = sequence.node, self.index.enter(node)
        self.index.leave(before)

    def _take(self, group: int) -> int:
        allocator = self.allocators[group]
        if not allocator.free_count:
            allocator.free(self.index.evict(group))
        return allocator.take()

    def _hold(self, group: int, page: int) -> None:
        self.index.revive(group, page)
        self.allocators[group].retain(page)

    def _drop(self, group: int, page: int) -> None:
        if self.allocators[group].release(page):
            return
        self.freed += 1
        if (group, page) in self.index:
            self.index.park(group, page)
        else:
            self.allocators[group].free(page)
