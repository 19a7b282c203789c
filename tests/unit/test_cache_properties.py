"""Whatever is asked of the cache in whatever order, no page is lost, owned twice or overwritten while others see it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nearfar.edge_runtime.cache import PageAllocator, Sequence, SequenceTable

PAGES, PAGE_SIZE, SLOTS = 9, 3, 4
tokens = st.lists(st.integers(0, 2), max_size=14)
pick = st.integers(0, 10_000)


class CacheMachine(RuleBasedStateMachine):
    """Random operations, with a shadow device memory: `memory[page][i]` is the token whose K/V were written there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(PAGES, PAGE_SIZE, SLOTS)
        self.memory = [[-1] * PAGE_SIZE for _ in range(PAGES)]
        self.borrowed: list[Sequence] = []
        self.computed: set[tuple[int, ...]] = set()  # beginnings that were published, in whole pages

    def any_sequence(self, number: int) -> Sequence:
        live = list(self.table.sequences.values())
        return live[number % len(live)]

    def extend(self, sequence: Sequence, new: list[int], extra: int = 0) -> None:
        """Reserve, queue on the shadow device what the engine would queue, append."""
        start = len(sequence.tokens)
        copies = self.table.reserve(sequence, start + len(new) + extra)
        if copies is None:
            return
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for position, token in enumerate(new, start):
            page = sequence.pages[position // PAGE_SIZE]
            assert self.table.allocator.refs[page] == 1
            assert page not in self.table.index
            self.memory[page][position % PAGE_SIZE] = token
        self.table.append(sequence, new)

    def read(self, sequence: Sequence, length: int) -> None:
        """The step that computed so many tokens has been read."""
        whole = min(length, len(sequence.tokens)) // PAGE_SIZE * PAGE_SIZE
        self.computed |= {tuple(sequence.tokens[:end]) for end in range(PAGE_SIZE, whole + 1, PAGE_SIZE)}
        self.table.publish(sequence, length)

    @rule(prompt=tokens)
    def open(self, prompt: list[int]) -> None:
        sequence = self.table.open(prompt)
        if sequence is None:
            assert len(self.table.sequences) == SLOTS
            return
        assert len(sequence.tokens) < max(len(prompt), 1)
        assert sequence.tokens == prompt[: len(sequence.tokens)]
        self.extend(sequence, prompt[len(sequence.tokens) :])

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, new=st.lists(st.integers(0, 2), max_size=5), extra=st.integers(0, 4))
    def grow(self, number: int, new: list[int], extra: int) -> None:
        self.extend(self.any_sequence(number), new, extra)

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, length=st.integers(0, 20))
    def step_was_read(self, number: int, length: int) -> None:
        self.read(self.any_sequence(number), length)

    @rule()
    def a_step_failed(self) -> None:
        """What the engine does: every sequence goes, and nothing is found any more."""
        for sequence in list(self.table.sequences.values()):
            self.table.release(sequence)
        for sequence in self.borrowed:
            self.table.truncate(sequence, 0)
        self.borrowed.clear()
        self.table.forget()
        self.computed.clear()
        assert self.table.index.entries() == []

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick)
    def fork(self, number: int) -> None:
        parent = self.any_sequence(number)
        child = self.table.fork(parent)
        if child is not None:
            assert child.tokens == parent.tokens[: parent.computed]

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick, length=st.integers(0, 20))
    def truncate(self, number: int, length: int) -> None:
        sequence = self.any_sequence(number)
        self.table.truncate(sequence, min(length, len(sequence.tokens)))

    @precondition(lambda self: self.table.sequences)
    @rule(number=pick)
    def release(self, number: int) -> None:
        self.table.release(self.any_sequence(number))

    @rule(prefix=tokens)
    def borrow(self, prefix: list[int]) -> None:
        """What a snapshot does: hold what the cache has of whole pages, fill the rest."""
        prefix = prefix[: len(prefix) // PAGE_SIZE * PAGE_SIZE]
        sequence = self.table.borrow(prefix)
        assert sequence.tokens == prefix[: len(sequence.tokens)]
        self.borrowed.append(sequence)
        self.extend(sequence, prefix[len(sequence.tokens) :])
        self.read(sequence, len(sequence.tokens))

    @precondition(lambda self: self.borrowed)
    @rule(number=pick)
    def give_back(self, number: int) -> None:
        sequence = self.borrowed.pop(number % len(self.borrowed))
        prefix = list(sequence.tokens)
        self.table.truncate(sequence, 0)
        found = self.table.borrow(prefix)
        assert found.tokens == prefix
        self.table.truncate(found, 0)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        assert self.table.index.idle_count == 0

    @invariant()
    def every_page_has_one_place(self) -> None:
        live = [*self.table.sequences.values(), *self.borrowed]
        held = Counter(page for sequence in live for page in sequence.pages)
        free, idle = self.table.allocator.free_pages(), self.table.index.idle_pages()
        assert [held[page] for page in range(PAGES)] == self.table.allocator.refs
        assert sorted([*free, *idle, *held]) == list(range(PAGES))

    @invariant()
    def content_is_what_was_written(self) -> None:
        for sequence in [*self.table.sequences.values(), *self.borrowed]:
            read = [t for page in sequence.pages for t in self.memory[page]][: len(sequence.tokens)]
            assert read == sequence.tokens
        for page, _, content in self.table.index.entries():
            assert self.memory[page] == content

    @invariant()
    def only_what_was_read_is_found(self) -> None:
        entries = {page: (parent, content) for page, parent, content in self.table.index.entries()}
        for page in entries:
            path: list[int] = []
            while page >= 0:
                page, content = entries[page]
                path = [*content, *path]
            assert tuple(path) in self.computed
        for sequence in [*self.table.sequences.values(), *self.borrowed]:
            assert all(page in self.table.index for page in sequence.pages[: sequence.computed // PAGE_SIZE])

    @invariant()
    def parents_outlive_children(self) -> None:
        order = {page: age for age, page in enumerate(self.table.index.idle_pages())}
        for page, parent, _ in self.table.index.entries():
            if parent >= 0:
                assert parent in self.table.index
                assert order.get(page, PAGES) <= order.get(parent, PAGES)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


def test_long_random_run_leaks_nothing() -> None:
    machine, rng = CacheMachine(), random.Random(3)
    for _ in range(3000):
        action = rng.randrange(8)
        if action == 0 or not machine.table.sequences:
            machine.open([rng.randrange(2) for _ in range(rng.randrange(14))])
        elif action == 1:
            machine.grow(rng.randrange(99), [rng.randrange(2) for _ in range(rng.randrange(5))], rng.randrange(4))
        elif action == 2:
            machine.fork(rng.randrange(99))
        elif action == 3:
            machine.truncate(rng.randrange(99), rng.randrange(20))
        elif action < 6:
            machine.step_was_read(rng.randrange(99), rng.randrange(20))
        else:
            machine.release(rng.randrange(99))
        machine.every_page_has_one_place()
        machine.content_is_what_was_written()
        machine.only_what_was_read_is_found()
        machine.parents_outlive_children()
    for sequence in list(machine.table.sequences.values()):
        machine.table.release(sequence)
    machine.table.clear()
    assert sorted(machine.table.allocator.free_pages()) == list(range(PAGES))


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
