"""The torch engine's scheduler: invariants under random traffic, order by rank, chunks, preemption."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.fallback_server.torch_engine.scheduler import BatchLimits, Work, WorkChunk, WorkScheduler

PAGE = 4


def make(pages: int = 16, running: int = 4, budget: int = 8, ageing: float = 10.0) -> WorkScheduler:
    return WorkScheduler(SequenceTable(pages, PAGE, running), BatchLimits(running, budget, ageing))


def finish_step(chunks: list[WorkChunk], token: int = 1) -> list[Work]:
    """Do what the engine does after a step: append each sampled token."""
    done = [chunk.work for chunk in chunks if chunk.samples]
    for work in done:
        work.tokens.append(token)
    return done


def check(scheduler: WorkScheduler, chunks: list[WorkChunk]) -> None:
    """Check that nothing leaks, that no page visible to others is written, and that the step is within its
    limits.
    """
    held: dict[int, int] = {}
    for work in scheduler.running:
        assert work.sequence is not None
        for page in work.sequence.pages:
            held[page] = held.get(page, 0) + 1
    assert held == {page: count for page, count in enumerate(scheduler.table.allocators[0].refs) if count}
    assert all(work.sequence is None and work.computed == 0 for work in scheduler.waiting)
    assert sum(chunk.count for chunk in chunks) <= scheduler.limits.token_budget
    assert len(scheduler.running) <= scheduler.limits.max_running
    assert scheduler.running == sorted(scheduler.running, key=lambda work: work.rank)
    written: dict[int, str] = {}
    for chunk in chunks:
        assert chunk.work in scheduler.running
        assert chunk.work.computed == chunk.start + chunk.count
        assert chunk.samples == (chunk.work.computed == len(chunk.work.tokens))
        assert len(chunk.pages) * PAGE >= chunk.work.computed
        for position in range(chunk.start, chunk.start + chunk.count):
            if position // PAGE in chunk.known:
                continue
            page = chunk.pages[position // PAGE]
            assert written.setdefault(page, chunk.work.id) == chunk.work.id  # each page has one writer
            for other in scheduler.running:
                if other is not chunk.work and other.sequence and page in other.sequence.pages:
                    # Shared in the very step that fills it: readers come after all writers, and start behind
                    # it.
                    assert other.sequence.pages.index(page) == position // PAGE
                    assert other.computed >= (position // PAGE + 1) * PAGE


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(6, 24), st.integers(1, 5), st.integers(1, 12))
def test_random_traffic_leaks_nothing_and_ends(seed: int, pages: int, running: int, extra: int) -> None:
    r = random.Random(seed)
    scheduler = make(pages, running, running + extra)
    longest = pages * PAGE
    ends: dict[str, int] = {}
    count = finished = 0
    for turn in range(3000):
        if turn < 120 and r.random() < 0.4:
            prompt = [
                r.randrange(2) for _ in range(r.randint(1, longest - 1))
            ]  # there are few different tokens, so prefixes are shared
            work = Work(f"w{count}", prompt, r.randint(-2, 2), float(turn), whole=r.random() < 0.2)
            ends[work.id] = r.randint(len(prompt) + 1, min(longest, len(prompt) + 30))
            scheduler.add(work)
            count += 1
        if turn < 120 and len(scheduler) and r.random() < 0.1:
            scheduler.remove(r.choice(scheduler.waiting + scheduler.running))
            finished += 1
        chunks = scheduler.schedule()
        check(scheduler, chunks)
        if len(scheduler):
            assert chunks  # the first work in rank always continues
        for work in finish_step(chunks, r.randrange(2)):
            if len(work.tokens) >= ends[work.id]:
                scheduler.remove(work)
                finished += 1
        if turn > 120 and not len(scheduler):
            break
    assert finished == count
    assert not any(scheduler.table.allocators[0].refs)
    assert scheduler.table.available == pages


def test_prompts_are_computed_in_chunks_beside_decode() -> None:
    scheduler = make(pages=32, budget=6)
    scheduler.add(Work("short", [1, 2]))
    assert [(c.count, c.samples) for c in scheduler.schedule()] == [(2, True)]
    scheduler.running[0].tokens.append(3)
    scheduler.add(Work("long", list(range(10, 22))))
    sizes = []
    for _ in range(3):
        chunks = scheduler.schedule()
        sizes.append([(c.work.id, c.count, c.samples) for c in chunks])
        finish_step(chunks)
    assert sizes[0] == [("short", 1, True), ("long", 5, False)]
    assert sizes[1] == [("short", 1, True), ("long", 5, False)]
    assert sizes[2] == [("short", 1, True), ("long", 2, True)]


def test_a_prefix_is_shared_in_the_step_that_computes_it() -> None:
    scheduler = make(pages=32, budget=32)
    shared = list(range(8))
    for name in ("a", "b"):
        scheduler.add(Work(name, [*shared, ord(name)]))
    first, second = scheduler.schedule()
    assert (first.count, second.start, second.count) == (9, 8, 1)
    assert first.pages[:2] == second.pages[:2]
    assert scheduler.prefix_hits == 8


def test_twins_do_not_write_the_page_that_the_other_has_filled() -> None:
    """Two greedy answers to one prompt fill a page in the same step: the rows of the second one are not
    written.
    """
    scheduler = make(pages=32)
    for name in ("a", "b"):
        scheduler.add(Work(name, [1, 2], whole=True))
    for _ in range(3):
        chunks = scheduler.schedule()
        check(scheduler, chunks)
        finish_step(chunks, 7)
    assert [chunk.known for chunk in chunks] == [frozenset(), frozenset({0})]
    assert chunks[0].pages == chunks[1].pages


def test_smaller_priority_first_and_age_wins_in_the_end() -> None:
    scheduler = make(running=1, budget=8, ageing=10.0)
    for name, priority, arrival in (
        ("late", 0, 30.0),
        ("low", 2, 0.0),
        ("high", -1, 25.0),
        ("first", 0, 5.0),
    ):
        scheduler.add(Work(name, [1], priority, arrival))
    order = []
    while chunks := scheduler.schedule():
        order.append(chunks[0].work.id)
        scheduler.remove(chunks[0].work)
    # Ranks: first 5, high 25 - 10, low 0 + 20 (it has waited long enough to pass "late"), late 30.
    assert order == ["first", "high", "low", "late"]


def test_an_urgent_prompt_passes_a_long_one_under_way() -> None:
    scheduler = make(pages=32, budget=4)
    scheduler.add(Work("long", list(range(20))))
    scheduler.schedule()
    scheduler.add(Work("urgent", [50], priority=-1))
    assert [c.work.id for c in scheduler.schedule()] == ["urgent", "long"]


def test_the_last_in_rank_gives_up_its_pages() -> None:
    scheduler = make(pages=5, running=2, budget=16)
    scheduler.add(Work("first", [1] * 7, 0, 0.0, whole=True))
    scheduler.add(Work("second", [2] * 7, 0, 1.0, whole=True))
    for _ in range(9):
        finish_step(scheduler.schedule())
    assert scheduler.preemptions == 1
    assert [work.id for work in scheduler.running] == ["first"]
    assert [work.id for work in scheduler.waiting] == ["second"]
    scheduler.remove(scheduler.running[0])
    chunks = scheduler.schedule()
    assert [(c.work.id, c.samples) for c in chunks] == [("second", True)]
    assert chunks[0].start + chunks[0].count == len(chunks[0].work.tokens)


def test_rows_that_keep_their_logits_are_few_in_a_step() -> None:
    """Scored prompts share a limit of their own, others use the rest of the step, and all are completed."""
    scheduler = WorkScheduler(SequenceTable(64, PAGE, 4), BatchLimits(4, 32, whole_rows=5))
    works = [Work(f"{i}", [1] * 23, whole=i < 2) for i in range(4)]
    for work in works:
        scheduler.add(work)
    rows = []
    for _ in range(40):
        chunks = scheduler.schedule()
        rows.append(sum(chunk.count for chunk in chunks if chunk.work.whole))
        for done in finish_step(chunks):
            scheduler.remove(done)
        if not len(scheduler):
            break
    assert not len(scheduler)
    assert max(rows) == 5
    assert sum(rows) == 46
