"""Every architecture on every target in every precision: logits and greedy tokens are those of transformers
in float32.

The architectures are those of tests/support/architectures.py: tiny random models of transformers' own
classes, with odd shapes, for prompts within and beyond their windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.program.buckets import Buckets
from nearfar.edge_runtime import Engine
from tests.support.architectures import CASES, GROWTH, Case, Massive, checkpoint, prompt, reference
from tests.support.backends import executor, greedy, require

Array = npt.NDArray[Any]

BACKENDS = ("cpu", "webgpu-f32", "webgpu-f16", "vulkan-f32", "vulkan-f16", "mlx-f32")
TOLERANCE = {"f32": 2e-3, "f16": 2e-2}
"""Of the largest logit. float32: other orders of summation, and matmuls in 16-bit fixed point on the cpu."""
ANSWER = 12
SMALL = Buckets((1, 16), (1,))
"""Both kinds of matmul, and little to compile."""


FIRST = {case.model_type: case for case in reversed(CASES)}
"""A case of each architecture: on GPUs, whose shaders take longest to make."""
PAIRS = [
    pytest.param((case, backend), id=f"{case}-{backend}")
    for case in CASES
    for backend in BACKENDS
    if case is FIRST[case.model_type] or backend in ("cpu", "mlx-f32")
]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[Case, str]:
    made: tuple[Case, str] = request.param
    return made


@pytest.fixture(scope="module")
def case(pair: tuple[Case, str]) -> Case:
    return pair[0]


@pytest.fixture(scope="module")
def engine(pair: tuple[Case, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    case, backend = pair
    require(backend)
    target, _, precision = backend.partition("-")
    out = tmp_path_factory.getbasetemp() / str(case)
    if not (out / target).exists():  # another precision of the target has built it
        build(
            BuildOptions(
                str(checkpoint(case)), out, (target,), quant="none", buckets=SMALL, context=case.context
            )
        )
    with Engine.load(out / target, kv_memory="4MB", precision=precision or None) as loaded:
        yield loaded


def test_answers_are_those_of_transformers(case: Case, engine: Engine) -> None:
    tolerance = TOLERANCE[executor(engine).precision]
    for count in case.prompts:
        tokens = prompt(case, count)[: case.context and case.context - ANSWER]
        answer = greedy(engine, tokens, ANSWER)
        expected = reference(case)([*tokens, *answer])[len(tokens) - 1 : -1]
        close = tolerance * float(np.abs(expected).max())
        found = np.asarray(executor(engine).fetch("logits", 1)()[0])  # those that gave the last token
        assert np.abs(found - expected[-1]).max() < close, count
        for step, token in enumerate(answer):
            assert expected[step].max() - expected[step][token] < 2 * close, (count, step)


@pytest.mark.parametrize("where", GROWTH)
@pytest.mark.parametrize("target", ["vulkan", "webgpu"])
def test_massive_activations_stay_finite_in_float16(target: str, where: str, tmp_path: Path) -> None:
    require(target)
    model = Massive(tmp_path / "checkpoint", where)
    (path,) = build(BuildOptions(str(model.path), tmp_path / "out", (target,), "none", buckets=SMALL))
    with Engine.load(path, kv_memory="4MB", precision="f16") as engine:
        greedy(engine, model.tokens, 1)
        found = np.asarray(executor(engine).fetch("logits", 1)()[0])
    assert np.isfinite(found).all()
    if where == "residual":  # where gates saturate, answers differ from those of float32, but are answers
        expected = model.logits()
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
