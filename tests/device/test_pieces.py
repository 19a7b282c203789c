"""A model whose large matrices are stored in pieces gives the same text as with whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from nearfar.build import pipeline
from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.synth import ConfigShape, write_checkpoint
from nearfar.build.targets import target_of
from nearfar.build.targets.planned import PlannedTarget
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.kernels.buckets import Buckets
from nearfar.targets.gpu import variants
from nearfar.targets.gpu.pieces import BINDING
from tests.support.backends import require
from tests.support.browser import browser, new_page, serve
from tests.support.paths import ROOT
from tests.support.turns import in_turns, opposed

PIECE = 90_000
"""Largest piece in bytes: the sample's embedding of 2,048 by 256 takes 262,144 in q4, its gate and up
180,224.
"""
PROMPT = "<|user|>Tell me a story about a fox.<|end|><|assistant|>"
EXPERTS = {
    "model_type": "olmoe", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 12, "num_experts_per_tok": 3,
    "vocab_size": 640, "max_position_embeddings": 256, "eos_token_id": 639, "tie_word_embeddings": False,
    "initializer_range": 0.1,
}  # fmt: skip
"""A model whose experts take 196,608 bytes a layer in one of their two matrices in q4."""
Program = tuple[str, str, int]
"""A device class, a precision, and the rows of the program's only bucket: few rows for a matvec, more for
tiles.
"""
PLACES = opposed(("vulkan", "webgpu"), ("software", "discrete"), ("f32", "f16"), (1, 16))
"""Each target has one program in a run, because compiling programs takes most of the time."""
Sample = Callable[[str, str, int, Program], Path]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A model in q4 for a target, with bindings of this many bytes and one program; built once."""
    return cache(lambda *of: built(tmp_path_factory.mktemp("pieces"), *of))


def checkpoint(folder: Path, model: str) -> Path:
    """The sample, or a model with experts."""
    if model == "sample":
        return ROOT / "examples/sample-model"
    write_checkpoint(ConfigShape(EXPERTS), folder / "checkpoint")
    return folder / "checkpoint"


def built(folder: Path, model: str, target: str, binding: int, program: Program) -> Path:
    own, (device_class, precision, rows) = target_of(target), program
    assert isinstance(own, PlannedTarget)
    made = variants(vectors=target == "vulkan", binding=binding)
    only = tuple(each for each in made if each.precision == precision)
    cut = replace(own, packing=made[0].kernels, variants=lambda _: only)
    options = BuildOptions(
        str(checkpoint(folder, model)), folder / "out", (target,), "q4", buckets=Buckets((rows,), (1,)),
        device_classes=(device_class,),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "target_of", {target: cut}.__getitem__)
        return build(options)[0]


def answers(path: Path, target: str) -> Iterator[str]:
    """The answer of each program of an artifact."""
    for program in Artifact.open(path).manifest.programs:
        with Engine.load(path, device=target, kv_memory="4MB", program=program.name) as engine:
            done = engine.completions.create(prompt=PROMPT, max_tokens=40, temperature=0)
            yield done.choices[0].text


@pytest.mark.parametrize(("target", "program"), [(target, tuple(of)) for target, *of in PLACES], ids=str)
def test_the_text_is_that_of_whole_matrices(target: str, program: Program, sample: Sample) -> None:
    require(target)
    whole, cut = (sample("sample", target, binding, program) for binding in (BINDING, PIECE))
    tensors = [tensor.name for tensor in Artifact.open(cut).manifest.weights.tensors]
    assert [name for name in tensors if name.startswith("embed")] == [
        f"embed.{part}.{piece}" for piece in range(4) for part in ("codes", "scale_bias")
    ]
    assert "layers.0.gate_up.codes.1" in tensors
    assert max(bytes_of(cut)) <= PIECE < max(bytes_of(whole))
    said = list(answers(whole, target))
    assert len(said[0]) > 40
    assert list(answers(cut, target)) == said


def bytes_of(path: Path) -> list[int]:
    """Bytes of each tensor of the weights."""
    return [tensor.bytes for tensor in Artifact.open(path).manifest.weights.tensors]


@in_turns("model", "rows")
@pytest.mark.parametrize("model", ["sample", "experts"])
@pytest.mark.parametrize("rows", [1, 16])
def test_the_text_is_the_same_in_chromium(model: str, rows: int, sample: Sample) -> None:
    """Pieces of experts are whole experts."""
    said = []
    with browser() as chromium:
        for binding in (BINDING, PIECE):
            path = sample(model, "webgpu", binding, ("software", "f32", rows))
            names = {tensor.name for tensor in Artifact.open(path).manifest.weights.tensors}
            part = "layers.0.experts.gate_up.codes.1" if model == "experts" else "layers.0.gate_up.codes.1"
            assert (part in names) == (binding == PIECE)
            with serve(path.parent) as address:
                page = new_page(chromium, address)
                said.append(page.answer(prompt=PROMPT, max_tokens=40, temperature=0, raw=1))
                assert page.complaints == []
    assert said[0] == said[1]
    assert len(said[0]) > 40
