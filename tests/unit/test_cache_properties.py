"""Under any sequence of operations on the cache, no page is lost, owned twice, or overwritten while others
see it.

Every row also finds what it reads: in each group the positions of its window, with the content of its own
tokens.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearfar.edge_runtime.cache import PageAllocator, Sequence, SequenceTable

PAGE_SIZE, SLOTS = 3, 4
tokens = st.lists(st.integers(0, 2), max_size=14)
pick = st.integers(0, 10_000)
Content = tuple[int, ...]
"""Stands for the keys and values at a position, which follow from all tokens up to it."""


class CacheMachine(RuleBasedStateMachine):
    """Random operations, with a shadow device memory: `memory[group][page][i]` is what was written there."""

    pages: tuple[int, ...] = (9,)
    windows: tuple[int | None, ...] = (None,)
    strides: tuple[int | None, ...] | None = None
    """Positions of a column of states, by group. A page of states has the content of its last position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(self.pages, PAGE_SIZE, SLOTS, self.windows, self.strides)
        self.groups = range(len(self.windows))
        self.states = [group for group, window in enumerate(self.table.windows) if window.stride]
        self.memory: list[list[list[Content]]] = [[[()] * PAGE_SIZE for _ in range(n)] for n in self.pages]
        self.borrowed: list[Sequence] = []
        self.computed: set[tuple[int, ...]] = set()  # beginnings that were published, in whole pages

    @property
    def live(self) -> list[Sequence]:
        return [*self.table.sequences.values(), *self.borrowed]

    def any_sequence(self, number: int) -> Sequence:
        live = list(self.table.sequences.values())
        return live[number % len(live)]

    def extend(self, sequence: Sequence, new: list[int], extra: int = 0) -> bool:
        """Reserve, queue on the shadow device what the engine would queue, append. Returns whether there was
        room.
        """
        at = len(sequence.tokens)
        wanted = at + len(new) + extra
        grant = self.table.reservable(sequence, wanted)
        copies = self.table.reserve(sequence, wanted)
        assert (copies is not None) == (grant == wanted)
        if copies is None:
            return False
        for group, source, target in copies:
            self.memory[group][target] = list(self.memory[group][source])
        whole = [*sequence.tokens, *new]
        for position in range(at, len(whole)):
            for group, held in enumerate(sequence.held):
                column, place = divmod(position, self.table.windows[group].column)
                if column >= held.first:
                    page = held.pages[column - held.first]
                    assert self.table.allocators[group].refs[page] == 1
                    assert (group, page) not in self.table.index
                    if group in self.states and sequence.slot >= 0:  # a snapshot brings the last state alone
                        assert self.state_before(sequence, group, position) == tuple(whole[:position])
                    self.memory[group][page][0 if group in self.states else place] = tuple(
                        whole[: position + 1]
                    )
        self.table.append(sequence, new)
        return True

    def state_before(self, sequence: Sequence, group: int, position: int) -> Content:
        """The state that a row at the position reads."""
        if position == 0:
            return ()
        held = sequence.held[group]
        column = (position - 1) // self.table.windows[group].column - held.first
        assert column >= 0, "given back"
        return self.memory[group][held.pages[column]][0]

    def read(self, sequence: Sequence, length: int) -> None:
        """Record that the step that computed the first `length` tokens has been read."""
        whole = min(length, len(sequence.tokens)) // PAGE_SIZE * PAGE_SIZE
        self.computed |= {tuple(sequence.tokens[:end]) for end in range(PAGE_SIZE, whole + 1, PAGE_SIZE)}
        self.table.publish(sequence, length)
        for group, held in enumerate(sequence.held):
            window = self.table.windows[group]
            assert held.first == window.first_column(sequence.computed), (
                "what no row reads any more is given back"
            )
            rows = max(held.end * window.column - sequence.computed, 1)
            assert len(held.pages) <= window.most_columns(rows, held.end * window.column)

    @rule(prompt=tokens, step=st.integers(1, 14))
    def open(self, prompt: list[int], step: int = 3) -> None:
        """Run a prompt in steps, each of which ends at a border if it can; the last step may not have been
        read.
        """
        sequence = self.table.open(prompt)
        if sequence is None:
            assert len(self.table.sequences) == SLOTS
            return
        assert len(sequence.tokens) < max(len(prompt), 1)
        assert sequence.tokens == prompt[: len(sequence.tokens)]
        while len(sequence.tokens) < len(prompt):
            if not self.extend(sequence, prompt[len(sequence.tokens) :][:step]):
                return
            self.table.keep(sequence)

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, new=st.lists(st.integers(0, 2), max_size=5), extra=st.integers(0, 4))
    def grow(self, number: int, new: list[int], extra: int) -> None:
        self.extend(self.any_sequence(number), new, extra)

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, length=st.integers(0, 20))
    def step_was_read(self, number: int, length: int) -> None:
        sequence = self.any_sequence(number)
        self.read(sequence, max(length, sequence.computed))

    @rule()
    def a_step_failed(self) -> None:
        """Do what the engine does: end every sequence, and empty the prefix index."""
        for sequence in self.live:
            self.table.release(sequence)
        self.borrowed.clear()
        self.table.forget()
        self.computed.clear()
        assert list(self.table.index.nodes()) == []

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick)
    def fork(self, number: int) -> None:
        parent = self.any_sequence(number)
        length = self.table.shareable(parent, parent.computed)
        assert length == parent.computed or self.states
        child = self.table.fork(parent, length)
        if child is not None:
            assert child.tokens == parent.tokens[:length]

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, length=st.integers(0, 20))
    def truncate(self, number: int, length: int) -> None:
        sequence = self.any_sequence(number)
        least = self.table.least_length(sequence)
        if not any(self.windows):
            assert least == 0
        length = min(length, len(sequence.tokens))
        if self.states and length < len(sequence.tokens):
            length = self.table.shareable(sequence, length)
        self.table.truncate(sequence, length if length >= least else 0)

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick)
    def keep(self, number: int) -> None:
        """Do what the engine does after the end of a prompt: keep a border, where there are states."""
        self.table.keep(self.any_sequence(number))

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick)
    def release(self, number: int) -> None:
        self.table.release(self.any_sequence(number))

    @rule(prefix=tokens)
    def borrow(self, prefix: list[int]) -> None:
        """Do what a snapshot does: hold the cached pages, and fill the others; of windows only the last
        pages.
        """
        prefix = prefix[: len(prefix) // PAGE_SIZE * PAGE_SIZE]
        sequence = self.table.borrow(prefix)
        assert sequence.tokens == prefix[: len(sequence.tokens)]
        self.borrowed.append(sequence)
        self.table.slide(sequence, len(prefix))
        if self.extend(sequence, prefix[len(sequence.tokens) :]):
            self.table.keep(sequence)
            self.read(sequence, len(sequence.tokens))
        else:
            self.table.release(self.borrowed.pop())

    @precondition(lambda self: self.borrowed)
    @rule(number=pick)
    def give_back(self, number: int) -> None:
        sequence = self.borrowed.pop(number % len(self.borrowed))
        prefix = list(sequence.tokens)
        self.table.release(sequence)
        found = self.table.borrow(prefix)
        assert found.tokens == prefix
        self.table.release(found)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        assert not any(self.table.index.idle_count(group) for group in self.groups)

    @invariant()
    def every_page_has_one_place(self) -> None:
        for group in self.groups:
            held = Counter(page for sequence in self.live for page in sequence.held[group].pages)
            held += Counter(
                page
                for sequence in self.live
                for kept in sequence.kept.values()
                for of, page in kept
                if of == group
            )
            allocator = self.table.allocators[group]
            free, idle = allocator.free_pages(), self.table.index.idle_pages(group)
            assert [held[page] for page in range(self.pages[group])] == allocator.refs
            assert sorted([*free, *idle, *held]) == list(range(self.pages[group]))

    @invariant()
    def every_row_reads_what_was_written_for_it(self) -> None:
        """Checks rows that have not been read, and the next one: rows before `computed` do not run again."""
        for sequence in self.live:
            for row in range(sequence.computed, len(sequence.tokens) + 1):
                for group, size in enumerate(self.windows):
                    if group in self.states:
                        continue
                    oldest = 0 if size is None else max(row - size + 1, 0)
                    for position in range(oldest, min(row + 1, len(sequence.tokens))):
                        column = position // PAGE_SIZE - sequence.held[group].first
                        assert column >= 0, "given back"
                        page = sequence.held[group].pages[column]
                        assert self.table.allocators[group].refs[page] > 0
                        assert self.memory[group][page][position % PAGE_SIZE] == tuple(
                            sequence.tokens[: position + 1]
                        )
            for group in self.states:
                assert self.state_before(sequence, group, len(sequence.tokens)) == tuple(sequence.tokens)
            for length, kept in sequence.kept.items():
                for group, page in kept:
                    assert self.memory[group][page][0] == tuple(sequence.tokens[:length])

    @invariant()
    def the_index_knows_what_pages_hold(self) -> None:
        for _, path, node in self.table.index.nodes():
            assert path in self.computed, "only what was read is found"
            for group, page in enumerate(node.pages):
                if page is not None and group in self.states:
                    assert self.memory[group][page][0] == path
                elif page is not None:
                    start = len(path) - PAGE_SIZE
                    assert self.memory[group][page] == [path[: start + i + 1] for i in range(PAGE_SIZE)]
        for sequence in self.live:
            full = sequence.tokens[: sequence.computed // PAGE_SIZE * PAGE_SIZE]
            path, node = [], sequence.node
            while isinstance(node.key, tuple) and node.parent is not None:
                path, node = [*node.key, *path], node.parent
            assert path == full
            for group, held in enumerate(sequence.held):
                if group in self.states:
                    continue
                last = sequence.computed // PAGE_SIZE - held.first
                assert all((group, page) in self.table.index for page in held.pages[: max(last, 0)])

    @invariant()
    def parents_outlive_children_where_there_is_no_window(self) -> None:
        for group in (group for group in self.groups if self.windows[group] is None):
            order = {page: age for age, page in enumerate(self.table.index.idle_pages(group))}
            for _, path, node in self.table.index.nodes():
                page, parent = node.pages[group], node.parent
                if page is not None and parent is not None and len(path) > PAGE_SIZE:
                    above = parent.pages[group]
                    assert above is not None
                    assert order.get(page, 99) <= order.get(above, 99)


class FullAndWindow(CacheMachine):
    """Both kinds of layers, as in most models with windows; the window ends in the middle of a page."""

    pages, windows = (9, 7), (None, 5)


class WindowOnly(CacheMachine):
    """Every layer has the window."""

    pages, windows = (8,), (4,)


class ThreeGroups(CacheMachine):
    """Two windows, one of them shorter than a page."""

    pages, windows = (10, 8, 6), (None, 7, 2)


class States(CacheMachine):
    """Attention, a short convolution, and a recurrent state whose columns are two pages long."""

    pages, windows, strides = (10, 8, 9), (None, 4, 2), (None, None, 6)


class FewStates(CacheMachine):
    """A pool with so few states that borders are evicted; a column is a page long."""

    pages, windows, strides = (9, 4), (None, 2), (None, 3)


class StatesOnly(CacheMachine):
    """No attention at all."""

    pages, windows, strides = (8,), (2,), (6,)


MACHINES = (CacheMachine, FullAndWindow, WindowOnly, ThreeGroups, States, FewStates, StatesOnly)
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase
TestFullAndWindow = FullAndWindow.TestCase
TestWindowOnly = WindowOnly.TestCase
TestThreeGroups = ThreeGroups.TestCase
TestStates = States.TestCase
TestFewStates = FewStates.TestCase
TestStatesOnly = StatesOnly.TestCase


@pytest.mark.parametrize("kind", MACHINES, ids=lambda kind: kind.__name__)
def test_long_random_run_leaks_nothing(kind: type[CacheMachine]) -> None:
    machine, rng = kind(), random.Random(3)
    for _ in range(2000):
        action = rng.randrange(9 if machine.states else 8)
        if action == 0 or not machine.table.sequences:
            machine.open([rng.randrange(2) for _ in range(rng.randrange(14))])
        elif action == 1:
            machine.grow(
                rng.randrange(99), [rng.randrange(2) for _ in range(rng.randrange(5))], rng.randrange(4)
            )
        elif action == 2:
            machine.fork(rng.randrange(99))
        elif action == 3:
            machine.truncate(rng.randrange(99), rng.randrange(20))
        elif action == 8:
            machine.keep(rng.randrange(99))
        elif action < 6:
            machine.step_was_read(rng.randrange(99), rng.randrange(20))
        else:
            machine.release(rng.randrange(99))
        machine.every_page_has_one_place()
        machine.every_row_reads_what_was_written_for_it()
        machine.the_index_knows_what_pages_hold()
        machine.parents_outlive_children_where_there_is_no_window()
    for sequence in list(machine.table.sequences.values()):
        machine.table.release(sequence)
    machine.table.clear()
    for allocator in machine.table.allocators:
        assert sorted(allocator.free_pages()) == list(range(allocator.count))
    assert not machine.table.index._top.children, "no node outlives its pages"


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("rows", [1, 16, 61])
def test_a_window_bounds_the_pages_at_any_length(window: int, rows: int) -> None:
    table = SequenceTable((200, 200), 16, 1, (None, window))
    sequence = table.open(list(range(3000)))
    assert sequence is not None
    most = 0
    for start in range(0, 3000, rows):
        end = min(start + rows, 3000)
        assert table.reserve(sequence, 3000, end) == []
        most = max(most, len(sequence.held[1].pages))
        table.append(sequence, range(start, end))
        table.publish(sequence, end)
    assert most <= table.windows[1].most_columns(rows, 3000)
    assert most <= -(-(window + rows) // 16) + 1
    assert len(sequence.held[0].pages) == 188
    table.release(sequence)
    assert len(table.borrow(range(3000)).tokens) == 2992, "the last window is still cached"


def test_a_prefix_is_found_only_as_far_as_every_group_has_its_window() -> None:
    table = SequenceTable((64, 6), 4, 4, (None, 9))
    first = table.open(list(range(40)))
    assert first is not None
    for end in range(4, 41, 4):
        assert table.reserve(first, 40, end) is not None
        table.append(first, range(end - 4, end))
        table.publish(first, end)
    assert first.held[1].first == 8
    assert len(table.index.lookup(range(40), 10)) == 10
    assert len(table.index.lookup([*range(24), 99, 98], 6)) == 6, "given back, but still there"
    assert table.index.lookup([*range(16), 99, 98], 6) == [], "columns 2 and 3 had to make room"
    assert table.least_length(first) == 40
    fork = table.fork(first)
    assert fork is not None
    with pytest.raises(ValueError, match="cannot truncate 40 tokens to 39: it can be 0, or 40 to 40"):
        table.truncate(fork, 39)


def test_allocator_refuses_what_would_corrupt_it() -> None:
    allocator = PageAllocator(2)
    page = allocator.take()
    with pytest.raises(ValueError, match="still held"):
        allocator.free(page)
    allocator.release(page)
    with pytest.raises(ValueError, match="released more often"):
        allocator.release(page)


def test_append_needs_a_reservation() -> None:
    table = SequenceTable(2, 4, 1)
    sequence = table.open([1, 2])
    assert sequence is not None
    with pytest.raises(ValueError, match="reserve before append"):
        table.append(sequence, [1])
    with pytest.raises(ValueError, match="cannot truncate"):
        table.truncate(sequence, 1)


def test_pages_for_each_group() -> None:
    with pytest.raises(ValueError, match="2 numbers of pages for 1 groups"):
        SequenceTable((3, 4), 4, 1)
