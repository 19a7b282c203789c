"""The choice of rows for a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.engine.requests import Request
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scheduler import ScheduledStep, Scheduler, StepLimits
from nearfar.errors import RequestError

LIMITS = StepLimits((1, 4, 16, 64, 256), 16, 512)


def scheduler(pages: int = 200, slots: int = 16, context: int = 512) -> Scheduler:
    return Scheduler(SequenceTable(pages, 16, slots), StepLimits(LIMITS.buckets, min(16, slots), context))


def request(length: int, first: int = 0, limit: int = 100) -> Request:
    return Request(tuple(range(first, first + length)), SamplingParams(temperature=0), limit, 0)


def shape(step: ScheduledStep | None) -> tuple[int, list[tuple[int, int, bool] | None]] | None:
    """Bucket, and (start, count, samples) of each chunk."""
    if step is None:
        return None
    return step.size, [(c.start, c.count, c.samples) if c else None for c in step.chunks]


def sampled(scheduler: Scheduler, step: ScheduledStep, token: int = 7) -> None:
    scheduler.publish(step)
    for each in step.sampled:
        each.accept(token)
        scheduler.record(each)


def turn(scheduler: Scheduler) -> ScheduledStep:
    """Run one step, and read it before the next is scheduled."""
    step = scheduler.schedule(None)
    assert step is not None
    scheduler.queue(step)
    sampled(scheduler, step)
    return step


@pytest.mark.parametrize(
    ("decode", "wanted", "rows"),
    [
        (0, 1, 1),
        (0, 5, 5),
        (0, 16, 16),
        (0, 17, 16),
        (0, 32, 16),
        (0, 33, 33),
        (0, 65, 64),
        (0, 128, 64),
        (0, 129, 129),
        (0, 700, 256),
        (3, 65, 61),
        (3, 300, 253),
        (16, 1, 1),
        (16, 60, 48),
        (2, 2, 2),
    ],
)
def test_prefill_rows_avoid_half_empty_buckets(decode: int, wanted: int, rows: int) -> None:
    assert LIMITS.prefill_rows(decode, wanted) == rows


def test_a_long_prompt_is_computed_in_chunks() -> None:
    s = scheduler()
    s.add(request(300))
    assert shape(turn(s)) == (256, [(0, 256, False)])
    assert shape(turn(s)) == (64, [(256, 44, True)])
    assert shape(turn(s)) == (1, [(300, 1, True)])


def test_decode_comes_first_and_prefill_fills_the_rest() -> None:
    s = scheduler()
    s.add(request(10))
    turn(s)
    s.add(request(400, 1000))
    s.add(request(5, 2000))
    assert shape(turn(s)) == (256, [(10, 1, True), (0, 250, False), (0, 5, True)])
    assert shape(turn(s)) == (256, [(11, 1, True), (5, 1, True), (250, 150, True)])
    assert shape(turn(s)) == (4, [(12, 1, True), (400, 1, True), (6, 1, True)])


def test_no_more_requests_than_slots_and_first_come_first_served() -> None:
    s = scheduler(slots=2)
    requests = [request(3, 100 * i, limit=2) for i in range(5)]
    for each in requests:
        s.add(each)
    turn(s)
    assert s.running == requests[:2]
    s.remove(requests[0])
    turn(s)
    assert s.running == [requests[1], requests[2]]
    assert list(s.waiting) == requests[3:]


def test_the_step_after_is_planned_before_the_tokens_are_known() -> None:
    s = scheduler()
    a, b = request(10), request(6, 100, limit=1)
    s.add(a)
    s.add(b)
    first = s.schedule(None)
    assert first is not None
    s.queue(first)
    second = s.schedule(first)
    assert shape(second) == (4, [(10, 1, True), None])  # request b has its only token, so its row is padding
    assert second is not None
    assert second.fed == 2
    s.queue(second)
    sampled(s, first)
    assert (a.length, a.pending, len(a.sequence.tokens if a.sequence else [])) == (12, 1, 11)
    s.remove(b)
    third = s.schedule(second)
    assert shape(third) == (1, [(11, 1, True)])
    s.remove(a)
    assert s.schedule(third) is None


def test_a_request_that_ended_leaves_padding_so_that_the_others_keep_their_rows() -> None:
    s = scheduler()
    requests = [request(5, 100 * i) for i in range(3)]
    for each in requests:
        s.add(each)
    first = s.schedule(None)
    assert first is not None
    s.queue(first)
    s.remove(requests[1])
    s.add(request(6, 900))
    assert shape(s.schedule(first)) == (16, [(5, 1, True), None, (5, 1, True), (0, 6, True)])


class Anything:
    """A constraint that forbids nothing, but whose mask depends on every earlier token."""

    def allowed(self) -> npt.NDArray[Any]:
        return np.full(8, 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> bool:
        return True


def ahead(scheduler: Scheduler, before: ScheduledStep | None) -> ScheduledStep | None:
    """Queue a step, then read the step before it."""
    step = scheduler.schedule(before)
    if step is not None:
        scheduler.queue(step)
    if before is not None:
        sampled(scheduler, before)
    return step


def test_constrained_requests_that_came_one_after_the_other_decode_together() -> None:
    """Otherwise they would alternate from then on, each with a token in every second step only."""
    s = scheduler()
    a, b = request(5), request(6, 100)
    a.constraint = b.constraint = Anything()
    s.add(a)
    before = ahead(s, ahead(s, None))
    s.add(b)
    before = ahead(s, before)
    assert shape(before) == (16, [(5, 1, True), (0, 6, True)])
    decoded = []
    for _ in range(8):
        before = ahead(s, before)
        decoded.append(before and [chunk.request for chunk in before.chunks if chunk])
    assert decoded == [None, [a, b]] * 4


def test_constrained_requests_wait_for_no_other_where_there_is_more_to_do() -> None:
    s = scheduler()
    a, b, free = request(5), request(5, 100), request(5, 200)
    a.constraint = b.constraint = Anything()
    s.add(a)
    before = ahead(s, None)
    s.add(b)
    s.add(free)
    steps = []
    for _ in range(5):
        before = ahead(s, before)
        assert before is not None
        steps.append([chunk.request for chunk in before.chunks if chunk])
    # `free` has a row in each step, and the prompts were read while the token of `a` was in flight.
    assert steps == [[b, free], [free, a], [free, b], [free, a], [free, b]]
    s.remove(free)
    assert ahead(s, before) is None  # nothing is scheduled until the token of `b` has been read
    assert [chunk.request for chunk in turn(s).chunks if chunk] == [a, b]


def test_preemption_takes_the_youngest_and_reads_first_what_is_in_flight() -> None:
    s = scheduler(pages=3)
    old, young = request(8), request(8, 100)
    s.add(old)
    s.add(young)
    for _ in range(9):
        turn(s)  # both grow to 16 tokens
    step = s.schedule(None)  # `old` takes the third page, and `young` is preempted
    assert step is not None
    assert step.sampled == [old]
    assert list(s.waiting) == [young]
    assert (young.sequence, young.queued, young.tokens[-2:]) == (None, 0, [7, 7])
    s.queue(step)
    sampled(s, step)
    s.remove(old)
    assert shape(turn(s)) == (1, [(16, 1, True)])  # the full page of `young` was still in the prefix index


def test_nothing_is_preempted_while_tokens_are_unread() -> None:
    s = scheduler(pages=3)
    old, young = request(8), request(8, 100)
    s.add(old)
    s.add(young)
    for _ in range(8):
        turn(s)
    first = s.schedule(None)
    assert first is not None
    s.queue(first)
    assert s.schedule(first) is None
    assert list(s.waiting) == []
    sampled(s, first)
    assert shape(s.schedule(None)) == (1, [(16, 1, True)])
    assert list(s.waiting) == [young]


def test_a_request_waits_for_the_prefix_that_another_is_computing_and_then_shares_it() -> None:
    s = scheduler()
    first, second = request(300), Request((*range(290), 5, 6), SamplingParams(), 10, 0)
    s.add(first)
    s.add(second)
    assert turn(s).sampled == []
    assert s.running == [first]
    assert shape(turn(s)) == (64, [(256, 44, True)])
    step = s.schedule(None)
    assert shape(step) == (4, [(300, 1, True), (290, 2, True)])
    assert step is not None
    assert len(step.copies) == 1  # the page that both sequences share in part is copied
    assert second.cached_tokens == 290


def test_what_another_tenant_is_answered_is_not_borrowed() -> None:
    s = scheduler()
    first, second = (Request(tuple(range(300)), SamplingParams(), 10, 0, salt=salt) for salt in ("a", "b"))
    s.add(first)
    turn(s)
    turn(s)
    s.add(second)
    step = s.schedule(None)
    assert second in s.running
    assert second.cached_tokens == 0
    assert step is not None
    assert step.copies == ()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    s = scheduler(context=64)
    assert s.limit_tokens(range(10), 20) == 20
    assert s.limit_tokens(range(10), 200) == 54
    assert s.limit_tokens(range(63), None) == 1
    with pytest.raises(RequestError, match="is 64 tokens, the answer included, but the prompt has 64"):
        s.limit_tokens(range(64), 1)


def test_prompts_that_wait_for_each_others_windows_come_through_one_after_the_other() -> None:
    """Each alone fits the window's pool; together they fill it half-way through their prompts."""
    table = SequenceTable((400, 20), 16, 4, (None, 40))
    s = Scheduler(table, StepLimits(LIMITS.buckets, 4, 2000))
    requests = [request(900, 1000 * number, limit=3) for number in range(3)]
    for each in requests:
        s.add(each)
    flying: ScheduledStep | None = None
    turns = 0
    while s.waiting or s.running:
        step = s.schedule(flying)
        if step is not None:
            s.queue(step)
        if flying is not None:
            sampled(s, flying)
            for each in [r for r in s.running if len(r.tokens) == 903]:
                s.remove(each)
        assert step is not None or flying is not None, "nothing is in flight, and nothing can be done"
        flying = step
        turns += 1
        assert turns < 60
    assert all(len(each.tokens) == 903 for each in requests)
    assert not any(table.allocators[1].refs)


def test_what_a_window_gives_back_while_a_step_is_in_flight_is_no_longer_read_by_it() -> None:
    table = SequenceTable((64, 24), 16, 2, (None, 20))
    s = Scheduler(table, StepLimits(LIMITS.buckets, 2, 1000))
    one = request(512)
    s.add(one)
    first = s.schedule(None)
    assert first is not None
    s.queue(first)
    second = s.schedule(first)
    assert shape(second) == (256, [(256, 128, False)]), "as far as there are pages for the window"
    assert second is not None
    s.queue(second)
    assert one.sequence is not None
    assert one.sequence.held[1].first == 0, "the first step has not been read"
    sampled(s, first)
    assert one.sequence.held[1].first == (256 - 19) // 16, "rows of the second step begin at 256"


class Counted(int):
    """A token that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        Counted.compared += 1
        return int.__ne__(self, other)  # type: ignore[arg-type]

    __hash__ = int.__hash__


def long_request(shared: list[Counted], last: int) -> Request:
    return Request((*shared, Counted(last)), SamplingParams(temperature=0), 100, 0)


def test_a_request_that_waits_for_pages_costs_no_comparison_of_its_prompt() -> None:
    s = scheduler(pages=140, context=4096)
    shared = [Counted(token) for token in range(2000)]
    for number in range(6):
        s.add(long_request(shared, 5000 + number))
    while len(s.running) < 6 or any(each.remaining > 1 for each in s.running):
        turn(s)
    other = Request(
        tuple(Counted(9000 + token) for token in range(1500)), SamplingParams(temperature=0), 100, 0
    )
    s.add(other)
    turn(s)
    assert list(s.waiting) == [other], "there is no room for it"
    Counted.compared = 0
    for _ in range(8):
        turn(s)
    assert Counted.compared < 500, "the prompts are not walked again while nothing has been given back"
    for each in list(s.running):
        s.remove(each)
    turn(s)
    assert list(s.running) == [other], "room was given back"


def test_only_a_prompt_under_way_is_compared_with_one_that_waits() -> None:
    s = scheduler(pages=200, context=4096)
    shared = [Counted(token) for token in range(1000)]
    s.add(long_request(shared, 5000))
    while not s.running or s.running[0].remaining > 1:
        turn(s)
    Counted.compared = 0
    assert not s._soon_cached(long_request(shared, 6000))
    assert Counted.compared == 0
