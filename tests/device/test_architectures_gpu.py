"""Every architecture on the targets with shaders, in both precisions: logits and greedy tokens are
transformers'. One case of each architecture, as their shaders take longest to make.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.program.buckets import Buckets
from nearfar.edge_runtime import Engine
from tests.support import gpu_jobs
from tests.support.architectures import CASES, GROWTH, Case, Massive, outlying
from tests.support.backends import greedy, require
from tests.support.parity import SMALL, check_answers, last, opened

FIRST = {case.model_type: case for case in reversed(CASES)}
FEW = Buckets((1, 4), (1,))
SHAPED = {
    "llama": True, "qwen2": True, "qwen3": True, "gemma3_text": True, "ministral3": True,
    "hunyuan_v1_dense": True, "gemma4_text": True, "smollm3": True, "olmo2": False,
}  # fmt: skip
"""Whether the projections of an architecture append by themselves: with bias, norms of heads before and after
the rotation, two groups of windows, a factor of q, heads of v that are normed, layers that do not turn; with
norms over all heads they cannot.
"""
TARGETS = pytest.mark.parametrize("target", ["vulkan", "webgpu"])


@TARGETS
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_answers_are_those_of_transformers(case: Case, target: str, tmp_path: Path) -> None:
    for precision in ("f32", "f16"):
        with opened(case, f"{target}-{precision}", tmp_path) as engine:
            check_answers(case, engine)


@pytest.mark.parametrize(("model_type", "fused"), SHAPED.items())
def test_kernels_for_gpus_answer_as_transformers(model_type: str, fused: bool, tmp_path: Path) -> None:
    """Whole steps of few rows, with what only classes of GPUs have: projections that append, or cannot."""
    at = list(SHAPED).index(model_type)
    target, device = ("vulkan", "webgpu")[at % 2], gpu_jobs.GPU_CLASSES[at % 3]
    for precision in ("f32", "f16"):
        with opened(FIRST[model_type], f"{target}-{precision}", tmp_path, device, FEW) as engine:
            check_answers(FIRST[model_type], engine)
    manifest = json.loads((tmp_path / target / "manifest.json").read_text())
    for program in manifest["programs"]:
        assert any(name.startswith("project_") for name in program["kernels"]) is fused


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


@pytest.mark.parametrize("quant", ["none", "q8"])
@pytest.mark.parametrize(("target", "device"), [("vulkan", "discrete"), ("webgpu", "mobile")])
def test_a_few_huge_channels_do_not_drown_all_others_in_float16(
    target: str, device: str, quant: str, tmp_path: Path
) -> None:
    """The two precisions differ by no more than activations in float16 do: prompts of one token and of 40."""
    require(target)
    source = str(outlying(tmp_path / "checkpoint", quantized=quant != "none"))
    (path,) = build(
        BuildOptions(
            source, tmp_path / "out", (target,), quant, buckets=SMALL, device_classes=("software", device)
        )
    )
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 256, 40)]
    found = {}
    for precision in ("f32", "f16"):
        with Engine.load(path, kv_memory="4MB", program=f"{device}-{precision}") as engine:
            for count in (1, 40):
                greedy(engine, tokens[:count], 1)
                found[precision, count] = last(engine)
    for count in (1, 40):
        exact = found["f32", count]
        assert np.abs(found["f16", count] - exact).max() < 2e-3 * np.abs(exact).max(), count
