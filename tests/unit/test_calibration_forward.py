"""The forward of a calibration: what the NumPy reference computes token by token, for every architecture."""

from __future__ import annotations

import numpy as np
import pytest

from nearfar.build.calibration.forward import Forward, stretches
from nearfar.step import ops
from tests.support.architectures import CASES, Case, checkpoint
from tests.support.step_reference import StepReference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_the_reference(case: Case) -> None:
    reference = StepReference.of(checkpoint(case), case.context)
    rng = np.random.default_rng(0)
    windows = rng.integers(0, reference.model.vocab_size, (3, 30))
    expected = [reference.logits(window.tolist()) for window in windows]
    forward = Forward(reference.step, windows)
    *body, end = stretches(reference.step)
    seen: dict[str, int] = {}

    def watch(name: str, inputs: np.ndarray) -> None:
        assert inputs.shape[1] == reference.weights[name].shape[1]
        seen[name] = seen.get(name, 0) + len(inputs)

    for stretch in body:
        weights = {name: reference.weights[name] for name in stretch.params}
        forward.watch(stretch, weights, watch)
        forward.advance(stretch, weights)
    forward.watch(end, {name: reference.weights[name] for name in end.params}, watch)
    found = np.concatenate(list(forward.finish(end, reference.weights)))
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=2e-4, atol=2e-4)
    matrices = {op.weight for op in reference.step.ops if isinstance(op, ops.Linear | ops.Logits)}
    assert set(seen) == matrices
    assert len(body) >= len(reference.step.caches)
