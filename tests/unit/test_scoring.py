"""Log-probabilities of labels after a prompt equal those of a plain pass over the tokens, whatever
else runs.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import numpy as np
import pytest

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.engine.requests import Request, ScoredRow
from nearfar.edge_runtime.engine.row_scores import scored_rows
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scheduler import Scheduler, StepLimits
from nearfar.edge_runtime.engine.scoring import score
from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.errors import ContextError, DeviceError, DeviceLost, RequestError
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor
from tests.support.paths import ROOT
from tests.support.servers import tiny_core

PROMPT = [256, *range(60, 100)]
LABELS = [[70], [71, 72], [71, 73, 74], [200, 201, 202, 203], [70, 5], [9]]


def plain(tokens: list[int]) -> Any:
    """Log-probabilities after each token, from one pass of the reference over all of them."""
    executor = NumpyExecutor({**tiny.CONFIG, "max_position_embeddings": 1024}, tiny.weights(), pages=64)
    rows = []
    for start in range(0, len(tokens), 16):
        part = tokens[start : start + 16]
        executor.write("page_table.0", np.arange(64, dtype=np.int32)[None])
        executor.write("tokens", np.array(part, np.int32))
        executor.write("positions", np.arange(start, start + len(part), dtype=np.int32))
        executor.write("logit_rows", np.arange(16, dtype=np.int32))
        executor.write("positions", np.full(16 - len(part), -1, np.int32), len(part))
        executor.run("step", 16)
        rows.append(executor.fetch("logits", len(part))().astype(np.float64))
    logits = np.concatenate(rows)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def expected(prompt: list[int], label: list[int]) -> list[float]:
    rows = plain([*prompt, *label])
    return [float(rows[len(prompt) - 1 + at][token]) for at, token in enumerate(label)]


def check(found: list[tuple[float, ...]], prompt: list[int], labels: list[list[int]]) -> None:
    for scores, label in zip(found, labels, strict=True):
        assert list(scores) == pytest.approx(expected(prompt, label), abs=1e-4)


async def test_each_label_has_the_log_probabilities_of_a_plain_pass() -> None:
    core = tiny_core()
    check(await score(core, PROMPT, LABELS), PROMPT, LABELS)
    steps = core.steps
    check(await score(core, PROMPT, LABELS), PROMPT, LABELS)  # from the cache
    assert core.steps - steps == 2, "the prompt's last row, then all branches at once"
    check(await score(core, PROMPT[:1], [[3], [4, 5]]), PROMPT[:1], [[3], [4, 5]])
    assert not core.scheduler.running
    assert not core.scheduler.waiting
    await core.close()


async def test_branches_begin_where_the_prompt_ends_not_at_its_last_full_page() -> None:
    core = tiny_core()
    rows: list[int] = []
    build = core._builder._rows
    core._builder._rows = lambda step: rows.append(sum(c.count for c in step.chunks if c)) or build(step)
    await score(core, PROMPT, [[7, 8], [9, 10], [11, 12, 13]])
    assert rows == [len(PROMPT), 1 + 1 + 2]
    await core.close()


async def test_more_labels_than_slots_beside_answers() -> None:
    core = tiny_core(slots=4)
    many = [[first, first + 1, 7] for first in range(40)]
    answers = [core.generate([1, 2, n], SamplingParams(max_tokens=30, temperature=0)) for n in range(3)]
    texts = asyncio.gather(*(_all(answer) for answer in answers))
    found = await asyncio.gather(*(score(core, [*PROMPT, n], many) for n in range(3)))
    for n in range(3):
        check(found[n][::13], [*PROMPT, n], many[::13])
    alone = [
        await _all(core.generate([1, 2, n], SamplingParams(max_tokens=30, temperature=0))) for n in range(3)
    ]
    assert await texts == alone
    await core.close()


async def test_no_pages_for_all_branches() -> None:
    core = tiny_core(pages=6)
    many = [[first, 1, 2, 3] for first in range(12)]
    check((await score(core, PROMPT, many))[::5], PROMPT, many[::5])
    await core.close()


async def test_a_device_that_is_lost_is_asked_again_and_a_cancelled_call_leaves_nothing() -> None:
    core = tiny_core()
    run, losses = core.executor.run, [2, 1]

    def fails(function: str, size: int) -> None:
        if losses and core.steps == losses[-1]:  # the prompt's step, and later that of the branches
            losses.pop()
            raise DeviceLost("unplugged")
        run(function, size)

    core.executor.run = fails  # type: ignore[method-assign]
    check(await score(core, PROMPT, LABELS), PROMPT, LABELS)
    assert not losses
    gone = asyncio.create_task(score(core, [*PROMPT, 1], LABELS))
    while not core.scheduler.running:
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.sleep(0)
    assert not core.scheduler.running
    assert not core.scheduler.table.sequences
    await core.close()


async def test_logits_that_are_not_finite_end_the_call() -> None:
    core = tiny_core()
    fetch = core.executor.fetch

    def broken(buffer: str, rows: int) -> Any:
        made = fetch(buffer, rows)
        return (lambda: made() * np.float32("nan")) if buffer == "logits" else made

    core.executor.fetch = broken  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="not finite"):
        await score(core, PROMPT, LABELS)
    await core.close()


@pytest.mark.parametrize(
    ("prompt", "labels", "said"),
    [
        ([], [[1]], "empty"),
        ([1], [], "labels"),
        ([1], [[2], []], "labels"),
        ([1], [[261]], "outside the vocabulary"),
        ([1] * 1020, [[2], [1] * 9], "context"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    prompt: list[int], labels: list[list[int]], said: str
) -> None:
    core = tiny_core()
    with pytest.raises((RequestError, ContextError), match=said):
        await score(core, prompt, labels)
    assert core.steps == 0
    await core.close()


def test_rows_of_a_chunk_leave_room_for_other_requests() -> None:
    rows = tuple(ScoredRow(at, (0,)) for at in range(10, 16))
    assert scored_rows(rows, 0, 10, 2) == (10, ())
    assert scored_rows(rows, 0, 16, 2) == (12, rows[:2])
    assert scored_rows(rows, 12, 4, 9) == (4, rows[2:])
    assert scored_rows(rows, 10, 6, 0) == (0, ())
    maybe = tuple(ScoredRow(at, (0,), optional=True) for at in range(64))
    last = ScoredRow(64, (0,))
    count, kept = scored_rows((*maybe, last), 0, 65, 16)
    assert (count, kept[-1], len(kept)) == (65, last, 14)


def test_a_held_prompt_gives_its_slot_to_a_request_that_waits() -> None:
    s = Scheduler(SequenceTable(200, 16, 2), StepLimits((1, 4, 16, 64, 256), 2, 512))
    held = Request(tuple(range(16)), SamplingParams(), 0, 0, scored=(ScoredRow(15, (1,)),), held=True)
    s.add(held)
    step = s.schedule(None)
    assert step is not None
    s.queue(step)
    s.publish(step)
    assert s.schedule(None) is None  # nothing to do, and nothing is preempted
    for first in (100, 200):
        s.add(Request(tuple(range(first, first + 5)), SamplingParams(), 3, 0))
    step = s.schedule(None)
    assert step is not None
    assert len(step.sampled) == 2
    assert held not in s.running
    assert s.preemptions == 0


def test_odds_are_those_of_the_shared_vectors() -> None:
    cases = json.loads((ROOT / "tests/vectors/decisions/odds.json").read_text())["cases"]
    for case in cases:
        made = label_odds([tuple(each) for each in case["labels"]], case["logprobs"], case["neutral"])
        assert list(made.probabilities) == pytest.approx(case["probabilities"], abs=1e-9), case["name"]
        assert made.confidence == pytest.approx(case["confidence"], abs=1e-9), case["name"]
        assert made.choice == case["choice"], case["name"]


async def _all(generation: Any) -> list[int]:
    return [event.token async for event in generation]


def test_the_vectors_say_what_the_formula_says() -> None:
    """A label that is the beginning of another one gets the remaining probability."""
    made = label_odds([(1,), (1, 0), (2,)], [math.log(0.5), math.log(0.2), math.log(0.3)])
    assert made.probabilities == pytest.approx([0.375, 0.25, 0.375])
