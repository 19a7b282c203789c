"""Numbers that are not finite stay in their own sequence: no token is made from them, and neighbours are not
affected.
"""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.edge_runtime import Engine, SamplingParams
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.errors import DeviceError
from tests.support.backends import Lab, cached_pages, executor, forget, greedy

NAN, INF = np.nan, np.inf
ROWS = 4


def spoiled(vocab: int) -> tuple[np.ndarray, list[int]]:
    """Logits [16, vocab], and the token that each of the first rows must give."""
    logits = np.random.default_rng(0).normal(0, 4, (16, vocab)).astype(np.float32)
    logits[0] = NAN
    logits[1] = [INF, -INF][0]
    logits[1, ::3], logits[1, 1::3] = -INF, NAN
    logits[2, :100], logits[2, 5], logits[2, vocab - 1], logits[2, 40] = NAN, INF, INF, 90
    logits[3] = -INF
    logits[3, vocab - 2] = -3e38
    return logits, [-1, -1, 40, vocab - 2]


@pytest.mark.parametrize("how", ["greedy", "coldest", "sample", "filtered"])
def test_only_a_finite_logit_is_sampled(lab: Lab, backend: str, how: str) -> None:
    engine = lab.engine("q4", backend)
    device, vocab, slots = executor(engine), engine.manifest.model.vocab_size, engine.manifest.cache.slots
    logits, expected = spoiled(vocab)
    if how in ("sample", "filtered"):
        logits[3, vocab - 2] = -3e4  # a draw adds noise, which the largest floats would swallow
    ints, floats = np.full((16, 8), -1, np.int32), np.zeros((16, 8), np.float32)
    ints[:ROWS, 0], ints[:ROWS, 1:5], ints[:ROWS, 5] = range(ROWS), 0, range(10, 10 + ROWS)
    floats[:, 0], floats[:, 1], floats[:, 3] = float(how in ("sample", "filtered")), 1, 1
    if how == "filtered":
        ints[:ROWS, 1], floats[:, 1], floats[:, 2] = 50, 0.9, 0.05
    words = (vocab + 31) // 32
    writes = {
        "logits": logits,
        "sample_i32": ints,
        "sample_f32": floats,
        "tokens": np.full(256, 7, np.int32),
        "counts": np.zeros((slots, vocab), np.int32),
        "logit_bias": np.zeros((slots, vocab), np.float32),
        "allowed": np.full((slots, words), 0xFFFFFFFF, np.uint32),
    }
    for name, data in writes.items():
        device.write(name, data)
    device.run("greedy" if how == "greedy" else "sample", ROWS)
    assert device.fetch("sampled", ROWS)().tolist() == expected
    assert device.fetch("tokens", 14)()[10:14].tolist() == [0, 0, *expected[2:]], (
        "what is fed must be a token"
    )
    counts = device.fetch("counts", slots)()
    assert counts.sum() == (0 if how == "greedy" else 2)
    assert how == "greedy" or all(counts[row, expected[row]] == 1 for row in (2, 3))
    device.write("counts", np.zeros_like(writes["counts"]))


def test_nothing_allowed_is_no_token(lab: Lab, backend: str) -> None:
    engine = lab.engine("q4", backend)
    device, vocab = executor(engine), engine.manifest.model.vocab_size
    ints, floats = np.full((16, 8), -1, np.int32), np.zeros((16, 8), np.float32)
    ints[0, :5], floats[:, 0], floats[:, 1], floats[:, 3] = [3, 0, 0, 0, 0], 1, 1, 1
    device.write("logits", np.zeros((16, vocab), np.float32))
    device.write("sample_i32", ints)
    device.write("sample_f32", floats)
    device.write("allowed", np.zeros((1, (vocab + 31) // 32), np.uint32), 3)
    device.run("sample", 1)
    assert device.fetch("sampled", 1)().tolist() == [-1]
    device.write("allowed", np.full((1, (vocab + 31) // 32), 0xFFFFFFFF, np.uint32), 3)


async def spoil(core: EngineCore, pages: list[int]) -> None:
    """Overwrite pages of the cache with NaN, in the parts that can hold it."""

    def write() -> None:
        content = core.executor.read_pages(0, pages)
        for array in content.values():
            if array.dtype.kind == "f":
                array[...] = NAN
        core.executor.write_pages(0, pages, content)

    await core.on_device(write)


def run(engine: Engine, pages: list[int]) -> None:
    """Spoil pages of an engine that runs on its own event loop."""
    engine._loop.run(spoil(engine.asynchronous.core, pages))


def test_pages_that_held_no_numbers_do_not_spoil_who_takes_them_next(lab: Lab, backend: str) -> None:
    engine = lab.engine("stories", backend)
    table = engine.asynchronous.core.scheduler.table
    prompts = [[1, *range(40, 40 + length)] for length in (3, 20, 70, 130)]
    forget(engine)
    expected = [greedy(engine, tokens, 20) for tokens in prompts]
    forget(engine)
    run(engine, table.allocators[0].free_pages()[:64])
    for tokens, wanted in zip(prompts, expected, strict=True):
        assert greedy(engine, tokens, 20) == wanted
    forget(engine)


def test_a_request_whose_logits_are_not_finite_fails_and_its_neighbour_does_not(
    lab: Lab, backend: str
) -> None:
    engine = lab.engine("stories", backend)
    core = engine.asynchronous.core
    bad, good = [1, *range(40, 90)], [1, *range(200, 250)]
    forget(engine)
    expected = greedy(engine, good, 12)
    greedy(engine, bad, 1)
    run(engine, cached_pages(engine, bad[:48]))
    epoch = core.epoch

    async def both() -> tuple[list[int], str]:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        neighbour = core.generate(good, params)
        broken = core.generate(bad, params)
        try:
            error = f"gave {[event.token async for event in broken]}"
        except DeviceError as raised:
            error = str(raised)
        return [event.token async for event in neighbour], error

    tokens, error = engine._loop.run(both())
    assert "not finite" in error
    assert "--precision f32" in error
    assert tokens == expected
    assert core.epoch == epoch, "the others need not start again"
    forget(engine)
