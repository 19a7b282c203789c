"""Every architecture on the targets with shaders, in both precisions: logits and greedy tokens are
transformers'. One case of each architecture, as their shaders take longest to make.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from tests.support.architectures import CASES, GROWTH, Case, Massive
from tests.support.backends import greedy, require
from tests.support.parity import SMALL, check_answers, last, opened

FIRST = {case.model_type: case for case in reversed(CASES)}
TARGETS = pytest.mark.parametrize("target", ["vulkan", "webgpu"])


@TARGETS
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_answers_are_those_of_transformers(case: Case, target: str, tmp_path: Path) -> None:
    for precision in ("f32", "f16"):
        with opened(case, f"{target}-{precision}", tmp_path) as engine:
            check_answers(case, engine)


@TARGETS
@pytest.mark.parametrize("where", GROWTH)
def test_massive_activations_stay_finite_in_float16(target: str, where: str, tmp_path: Path) -> None:
    require(target)
    model = Massive(tmp_path / "checkpoint", where)
    (path,) = build(
        BuildOptions(
            str(model.path), tmp_path / "out", (target,), "none", buckets=SMALL, device_classes=("software",)
        )
    )
    with Engine.load(path, kv_memory="4MB", precision="f16") as engine:
        greedy(engine, model.tokens, 1)
        found = last(engine)
    assert np.isfinite(found).all()
    if where == "residual":  # where gates saturate, answers differ from those of float32, but are answers
        expected = model.logits()
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
