"""A checkpoint of gpt-oss in its published form: experts in four-bit floats, which a build carries
exactly.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.build.source import open_source
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.executors.cpu import executor as cpu_executor
from nearfar.edge_runtime.executors.cpu import host_memory
from nearfar.errors import CheckpointError
from nearfar.kernels.buckets import Buckets
from tests.support.architectures import CASES, make, prompt
from tests.support.backends import executor, greedy, require
from tests.support.cases import Case
from tests.support.parity import last

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CASE = next(case for case in CASES if str(case) == "gpt_oss-plain")
WIDE: Case = replace(CASE, config={**CASE.config, "hidden_size": 64, "intermediate_size": 96})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint in four-bit floats, and the floats that it represents, as transformers writes them."""
    folder = tmp_path_factory.mktemp("mxfp4")
    floats, packed = make(WIDE, folder / "floats"), make(WIDE, folder / "packed")
    rng, tensors = np.random.default_rng(0), load_file(floats / "model.safetensors")
    tensors = {name: value.astype(np.float16).astype(np.float32) for name, value in tensors.items()}
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, k, n = tensors[name].shape
        patterns = rng.integers(0, 16, (experts, n, k // 32, 32), dtype=np.uint8)
        scales = rng.integers(122, 125, (experts, n, k // 32), dtype=np.uint8)
        wide = VALUES[patterns] * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
        tensors[name] = np.ascontiguousarray(wide.reshape(experts, n, k).swapaxes(1, 2))
        del stored[name]
        stored[f"{name}_blocks"] = patterns[..., ::2] | patterns[..., 1::2] << 4
        stored[f"{name}_scales"] = scales
    save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, floats


@pytest.fixture(scope="module")
def path(published: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the checkpoint in four-bit floats."""
    require("cpu")
    out = tmp_path_factory.mktemp("artifact")
    options = BuildOptions(
        str(published[0]), out, ("cpu",), buckets=Buckets((1, 16), (1,)), cpu_features=("native",)
    )
    (made,) = build(options)
    return made


@pytest.mark.skipif(not host_memory.MAPS, reason="experts are read when they are chosen on Linux only")
def test_experts_that_are_larger_than_memory_give_the_same_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for the experts of one layer: each layer reads its own in place of those before."""
    tokens = prompt(WIDE, 30)
    with Engine.load(path, kv_memory="4MB") as engine:
        expected = greedy(engine, tokens, 24)
    manifest = Artifact.open(path).manifest
    largest = max(
        t.bytes for t in manifest.weights.tensors if t.name.rpartition(".")[0] in manifest.step.chosen
    )
    monkeypatch.setattr(cpu_executor, "fits", lambda count: False)
    monkeypatch.setattr(cpu_executor, "LEAST", 1)
    monkeypatch.setattr(cpu_executor, "room_for", lambda others, stacks: 2 * largest)
    with Engine.load(path, kv_memory="4MB") as engine:
        experts = executor(engine)._experts
        assert experts is not None
        assert greedy(engine, tokens, 24) == expected
        assert 0 < experts._bytes <= 2 * largest
        assert sum(executor(engine).profile("step", 1)) > 0


def test_answers_are_those_of_the_floats(published: tuple[Path, Path], path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    stored = {each.name: each for each in Artifact.open(path).manifest.quantization.matrices}
    experts = [each for name, each in stored.items() if ".experts." in name]
    assert {(each.bits, each.group_size, each.carried) for each in experts} == {(5, 32, "exact")}
    assert len(experts) == 2 * WIDE.config["num_hidden_layers"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        published[1], dtype=torch.float32, experts_implementation="eager"
    ).eval()
    tokens = prompt(WIDE, 30)
    with Engine.load(path, kv_memory="4MB") as engine:
        greedy(engine, tokens, 1)
        found = last(engine)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1].numpy()
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_missing_scale_is_named(published: tuple[Path, Path], tmp_path: Path) -> None:
    for file in published[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        open_source(BuildOptions(str(tmp_path), tmp_path / "out", ("cpu",)))
