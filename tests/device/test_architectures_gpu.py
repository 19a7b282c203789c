"""Architectures from end to end on the targets with shaders: logits and greedy tokens are transformers'.

test_architecture_jobs.py runs their kernels one by one. Each run takes from end to end, in turns: the cases
of READS, one on each target; the cases of SHAPED with the kernels for a class of GPUs; two of all others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.format.adapters import DeviceClass
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Precision
from tests.support import gpu_jobs
from tests.support.architectures import CASES
from tests.support.backends import greedy, require
from tests.support.massive import GROWTH, Massive, outlying
from tests.support.parity import check_answers, last, only, opened
from tests.support.turns import in_turns

from .gpu_harness import PRECISIONS, TARGETS

NAMED = {str(case): case for case in CASES}
READS = (
    "llama-plain", "gemma4_text-shared", "arcee-plain", "gpt_oss-plain", "lfm2-plain", "qwen3_5_text-plain",
    "gemma4_text-experts", "qwen2_moe-plain", "granitemoehybrid-mamba", "falcon_h1-bare",
    "falcon_h1-multiplied", "nemotron_h-latent",
)  # fmt: skip
"""Cases whose lists together contain every pair of kinds of operations of which one reads the other's result:
see test_lists_of_steps.
"""
OTHERS = [case for case in NAMED.values() if str(case) not in READS]
SHARES = 2
"""OTHERS are split into this many shares; a run takes one case of each share."""
ROWS = pytest.mark.parametrize("rows", [1, 16])
"""Rows of the only bucket of a program, in turns: another bucket would add as many kernels again, connected
in the same way.
"""
FEW = pytest.mark.parametrize("rows", [1, 4])
"""Numbers of rows for which the kernels of classes of GPUs for few rows are chosen."""
SHAPED = {
    "llama-plain": True, "qwen2-plain": True, "qwen3-plain": True, "gemma3_text-plain": True,
    "ministral3-growing": True, "hunyuan_v1_dense-plain": True, "gemma4_text-shared": True,
    "smollm3-plain": True, "olmo2-plain": False,
}  # fmt: skip
"""Whether the projections of an architecture can append by themselves: with bias, norms of heads before and
after the rotation, two groups of windows, a factor of q, normalized heads of v, and layers without rotation
they can; with norms over all heads they cannot.
"""


@in_turns("target", "precision", "rows")
@TARGETS  # on top, so that neighbouring cases of READS run on different targets
@PRECISIONS
@ROWS
@pytest.mark.parametrize("name", READS)
def test_answers_are_those_of_transformers(
    name: str, rows: int, precision: Precision, target: str, tmp_path: Path
) -> None:
    with opened(NAMED[name], f"{target}-{precision}", tmp_path, buckets=Buckets((rows,), (1,))) as engine:
        check_answers(NAMED[name], engine)


@in_turns("name", "target", "precision", "rows")
@TARGETS
@PRECISIONS
@ROWS
@pytest.mark.parametrize(("share", "name"), [(i % SHARES, str(case)) for i, case in enumerate(OTHERS)])
def test_answers_of_others(
    share: int, name: str, rows: int, precision: Precision, target: str, tmp_path: Path
) -> None:
    buckets = Buckets((rows,), (1,))
    with opened(NAMED[name], f"{target}-{precision}", tmp_path, buckets=buckets) as engine:
        check_answers(NAMED[name], engine)


def test_lists_of_steps() -> None:
    """An architecture with a pair of operations that no list of READS has belongs in READS: it has launches,
    or orders of launches, that no other architecture has.
    """
    from tests.support import architecture_jobs

    known = frozenset[tuple[str, str]]().union(*(architecture_jobs.reads(NAMED[name]) for name in READS))
    new = {str(case): sorted(architecture_jobs.reads(case) - known) for case in NAMED.values()}
    assert not {name: found for name, found in new.items() if found}


@in_turns("target", "device", "precision", "rows")
@TARGETS
@PRECISIONS
@FEW
@pytest.mark.parametrize("device", gpu_jobs.GPU_CLASSES)
@pytest.mark.parametrize(("name", "fused"), SHAPED.items())
def test_kernels_for_gpus_answer_as_transformers(
    name: str, fused: bool, device: DeviceClass, rows: int, precision: Precision, target: str, tmp_path: Path
) -> None:
    """Whole steps of few rows, with features that only classes of GPUs have: projections that append, or
    cannot.
    """
    buckets = Buckets((rows,), (1,))
    with opened(NAMED[name], f"{target}-{precision}", tmp_path, device, buckets) as engine:
        check_answers(NAMED[name], engine)
    manifest = json.loads((tmp_path / target / "manifest.json").read_text())
    for program in manifest["programs"]:
        assert any(kernel.startswith("project_") for kernel in program["kernels"]) is fused


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("where", GROWTH)
def test_massive_activations_stay_finite_in_float16(target: str, where: str, tmp_path: Path) -> None:
    require(target)
    model = Massive(tmp_path / "checkpoint", where)
    source, buckets = str(model.path), Buckets((16,), (1,))
    with only(target, "f16"):
        (path,) = build(
            BuildOptions(
                source, tmp_path / "out", (target,), "none", buckets=buckets, device_classes=("software",)
            )
        )
    with Engine.load(path, kv_memory="4MB", precision="f16") as engine:
        greedy(engine, model.tokens, 1)
        found = last(engine)
    assert np.isfinite(found).all()
    # where gates saturate, answers differ from those of float32, but are still finite answers
    if where == "residual":
        expected = model.logits()
        assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@in_turns("target", "device", "rows")
@ROWS
@pytest.mark.parametrize(("target", "device"), [("vulkan", "discrete"), ("webgpu", "mobile")])
@pytest.mark.parametrize("quant", ["none", "q8"])
def test_a_few_huge_channels_do_not_drown_all_others_in_float16(
    target: str, device: str, rows: int, quant: str, tmp_path: Path
) -> None:
    """The two precisions differ by no more than activations in float16 do, for prompts of one token and of
    40.
    """
    require(target)
    source = str(outlying(tmp_path / "checkpoint", quantized=quant != "none"))
    (path,) = build(
        BuildOptions(
            source,
            tmp_path / "out",
            (target,),
            quant,
            buckets=Buckets((rows,), (1,)),
            device_classes=(device,),
            products=("float",),
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
