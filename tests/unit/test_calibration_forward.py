"""The forward of a calibration equals the NumPy reference, which computes token by token, for every
architecture.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from nearfar.build.calibration.forward import Forward, stretches
from nearfar.step import ops
from tests.support.architectures import CASES, checkpoint
from tests.support.cases import Case
from tests.support.step_reference import StepReference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_the_reference(case: Case) -> None:
    reference = StepReference.of(checkpoint(case), case.context)
    rng = np.random.default_rng(0)
    windows = rng.integers(0, reference.model.vocab_size, (3, 30))
    expected = [reference.logits(window.tolist()) for window in windows]
    forward = Forward(reference.step, windows)
    *body, end = stretches(reference.step)
    seen: Counter[str] = Counter()
    passed: Counter[str] = Counter()

    def watch(name: str, inputs: np.ndarray) -> None:
        assert inputs.shape[1] == reference.weights[name].shape[1]
        seen[name] += len(inputs)

    def passing(name: str, inputs: np.ndarray) -> None:
        passed[name] += len(inputs)

    for stretch in body:
        weights = {name: reference.weights[name] for name in stretch.params}
        forward.watch(stretch, weights, watch)
        forward.advance(stretch, weights, passing)
    weights = {name: reference.weights[name] for name in end.params}
    forward.watch(end, weights, watch)
    forward.copy().advance(end, weights, passing)
    assert passed == seen
    found = np.concatenate(list(forward.finish(end, reference.weights)))
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=2e-4, atol=2e-4)
    matrices = {op.weight for op in reference.step.ops if isinstance(op, ops.Linear | ops.Logits)}
    assert set(seen) == matrices
    # A recurrent layer has two caches: a window of inputs, and a state.
    assert len(body) >= sum(cache.parts != "state" for cache in reference.step.caches)


def test_keys_and_queries_are_told_as_attention_has_them() -> None:
    case = next(case for case in CASES if str(case) == "llama-plain")
    reference = StepReference.of(checkpoint(case), case.context)
    windows = np.random.default_rng(1).integers(0, reference.model.vocab_size, (2, 20))
    told: list[tuple[str, int, tuple[int, ...]]] = []
    forward = Forward(reference.step, windows)
    for stretch in stretches(reference.step)[:-1]:
        forward.advance(
            stretch, reference.weights, heads=lambda op, x: told.append((op.op, op.cache, x.shape))
        )
    expected = []
    for index, cache in enumerate(reference.step.caches):
        heads = next(
            op.heads for op in reference.step.ops if isinstance(op, ops.Attend) and op.cache == index
        )
        inner = (20, cache.head_dim)
        expected.append(("rope_append", index, (2, cache.kv_heads, *inner)))
        expected.append(("attend", index, (2, cache.kv_heads, heads // cache.kv_heads, *inner)))
    assert told == expected
