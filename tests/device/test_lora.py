"""LoRA adapters merged at build: the model answers like peft's adapted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nearfar.build.first_look import first_look
from nearfar.build.options import BuildOptions
from nearfar.build.pipeline import build
from nearfar.build.source import Source, open_source
from nearfar.build.weights.quantize import to_float32
from nearfar.edge_runtime import Engine
from nearfar.errors import CheckpointError, StoreError
from nearfar.store.entries import Store
from nearfar.store.naming import GivenOptions, mark_of, wanted_of
from tests.support import gguf_files
from tests.support.architectures import CASES, _auto, make, prompt
from tests.support.backends import greedy
from tests.support.cases import Case, case
from tests.support.late import late
from tests.support.parity import SMALL, last
from tests.support.step_reference import Array, StepReference

peft = late("peft", "torch", reason="peft is not installed")
torch = late("torch", reason="torch is not installed")

LLAMA = case("llama", "adapted", tie_word_embeddings=True, head_dim=24)
ATTENTION = ["q_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ATTENTION},
    "everything": {
        "target_modules": "all-linear", "rank_pattern": {"down_proj": 5, "layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"up_proj": 7}, "use_rslora": True,
    },
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "saved": {"target_modules": ["gate_proj"], "modules_to_save": ["lm_head", "norm"]},
}  # fmt: skip
OTHERS = ("phi3-plain", "qwen3_vl-with-qwen3_vl_text-text", "llava-with-llama-text")
"""Cases with joined matrices, and text models whose tensors have other names than their modules."""


def named(name: str) -> Case:
    return next(each for each in CASES if str(each) == name)


def adapter(base: Path, of: Case, folder: Path, **settings: Any) -> Array:
    """Save a random adapter of a checkpoint. Gives the logits of peft's adapted model after a prompt; they
    are taken before peft merges, because merging changes more where the head is the embedding.
    """
    model = _auto(of).from_pretrained(base, dtype=torch.float32).eval()
    config = peft.LoraConfig(r=4, lora_alpha=6, **settings)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    with torch.no_grad():
        return np.asarray(adapted.eval()(torch.tensor([prompt(of, 20)])).logits[0].numpy())


def logits(source: Source, of: Case) -> Array:
    """Logits of the step's list, with the tensors as the build reads them."""
    names = [name for param in source.params for name in param.tensors]
    held = {name: to_float32(source.checkpoint.read(name)) for name in names}
    return StepReference(source.model, held).logits(prompt(of, 20))


def near(found: Array, expected: Array, share: float = 1e-4) -> bool:
    return bool(np.abs(found - expected).max() < share * np.abs(expected).max())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(LLAMA, tmp_path_factory.mktemp("lora") / "base")


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_is_what_peft_makes_of_it(kind: str, base: Path, tmp_path: Path) -> None:
    expected = adapter(base, LLAMA, tmp_path / "mine", **KINDS[kind])
    options = BuildOptions(str(base), tmp_path / "out", quant="none", adapter=str(tmp_path / "mine"))
    source = open_source(options)
    assert near(logits(source, LLAMA), expected)
    assert not near(logits(open_source(replace(options, adapter=None)), LLAMA), expected, 1e-2)
    assert source.checkpoint.name == "base+mine"
    assert source.checkpoint.sha256() != open_source(replace(options, adapter=None)).checkpoint.sha256()
    whole = source.checkpoint.read("model.layers.1.self_attn.q_proj.weight")
    rows = source.checkpoint.read("model.layers.1.self_attn.q_proj.weight", 5, 9)
    np.testing.assert_array_equal(rows, whole[5:9])
    columns = source.checkpoint.read_columns("model.layers.1.self_attn.q_proj.weight", 3, 7)
    np.testing.assert_array_equal(columns, whole[:, 3:7])


@pytest.mark.parametrize("name", OTHERS)
def test_an_adapter_finds_its_tensors_under_other_names(name: str, tmp_path: Path) -> None:
    of = named(name)
    root = make(of, tmp_path / "base")
    modules = ["qkv_proj", "down_proj"] if of.model_type == "phi3" else r".*language_model.*\.(q|v)_proj"
    expected = adapter(root, of, tmp_path / "mine", target_modules=modules)
    source = open_source(
        BuildOptions(str(root), tmp_path / "out", quant="none", adapter=str(tmp_path / "mine"))
    )
    assert near(logits(source, of), expected)


def test_an_adapter_alone_is_built_into_the_model_that_it_names(base: Path, tmp_path: Path) -> None:
    expected = adapter(base, LLAMA, tmp_path / "mine", target_modules=ATTENTION)
    first_look(str(tmp_path / "mine"))
    options = BuildOptions(
        str(tmp_path / "mine"), tmp_path / "out", ("cpu",), "none", cpu_features=("native",)
    )
    (made,) = build(replace(options, buckets=SMALL))
    manifest = json.loads((made / "manifest.json").read_text())
    assert manifest["model"]["name"] == "base+mine"
    with Engine.load(made, kv_memory="4MB") as engine:
        greedy(engine, prompt(LLAMA, 20), 1)
        assert near(last(engine), expected[-1], 5e-3)


def test_of_quantized_weights_those_that_an_adapter_changes_are_quantized_anew(tmp_path: Path) -> None:
    file, floats = gguf_files.mixed(tmp_path, "Q8_0")
    of = replace(LLAMA, config={**gguf_files.WIDE})
    plain = {key: value for key, value in gguf_files.WIDE.items() if key != "model_type"}
    other = make(case("llama", "wide", **{**plain, "intermediate_size": 256}), tmp_path / "floats")
    adapter(other, of, tmp_path / "mine", target_modules=["q_proj"])
    source = open_source(BuildOptions(str(file), tmp_path / "out", adapter=str(tmp_path / "mine")))
    assert source.quantized is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    held = load_file(tmp_path / "mine" / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight"] for which in "AB")
    merged = floats[name] + np.float32(1.5) * (b @ a)
    np.testing.assert_allclose(source.quantized.weights(name, 3, 90), merged[3:90], atol=1e-6)
    assert source.report.anew == {("Q8_0 with the adapter", "q8 in groups of 32"): 1}
    assert set(source.quantized.tensors) - source.keeps == {name}


def changed(folder: Path, **config: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


def lost(folder: Path) -> Path:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    return folder


def strange(folder: Path) -> Path:
    file = folder / "adapter_model.safetensors"
    held = load_file(file)
    save_file({name.replace("layers.0", "layers.77"): value for name, value in held.items()}, file)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: changed(folder, use_dora=True), "use_dora is true, and DoRA rescales"),
        (lambda folder: changed(folder, bias="all"), 'bias is "all", and trained biases are not'),
        (lambda folder: changed(folder, init_lora_weights="pissa"), "convert the adapter to plain LoRA"),
        (lambda folder: changed(folder, peft_type="IA3"), 'peft_type is "IA3"; expected LORA'),
        (lambda folder: changed(folder, layer_replication=[[0, 2]]), "layer_replication is"),
        (lambda folder: changed(folder, a_key_of_tomorrow=3), "a_key_of_tomorrow is 3, and what it changes"),
        (lambda folder: changed(folder, r=9), "has rank 4 in adapter_model.safetensors, and r is 9"),
        (lambda folder: changed(folder, target_parameters=["mlp.experts.down_proj"]), "merge_and_unload"),
        (lambda folder: changed(folder, rank_pattern={"(": 3}), r'rank_pattern has "\(", which is not a'),
        (lost, "adapter_model.safetensors is missing"),
        (strange, "does not have as tensors of its own: it belongs to another model"),
    ],
)  # fmt: skip
def test_what_is_no_plain_lora_is_refused_by_name(
    change: Callable[[Path], Path], said: str, base: Path, tmp_path: Path
) -> None:
    adapter(base, LLAMA, tmp_path / "mine", target_modules=["q_proj"])
    mine = str(change(tmp_path / "mine"))
    with pytest.raises(CheckpointError, match=said):
        open_source(BuildOptions(str(base), tmp_path / "out", adapter=mine))
    if "adapter_config" in said or "use_dora" in said:
        with pytest.raises(CheckpointError, match=said):
            first_look(str(base), adapter=mine)


def test_weights_that_an_adapter_was_to_change_and_does_not_are_told(base: Path, tmp_path: Path) -> None:
    adapter(base, LLAMA, tmp_path / "mine", target_modules=["q_proj", "v_proj"])
    options = BuildOptions(str(base), tmp_path / "out", quant="none", adapter=str(tmp_path / "mine"))
    assert open_source(options).notes == ()
    file = tmp_path / "mine" / "adapter_model.safetensors"
    save_file(
        {name: value for name, value in load_file(file).items() if "layers.1.self_attn.q" not in name}, file
    )
    (note,) = open_source(options).notes
    assert "has no matrices for model.layers.1.self_attn.q_proj.weight, which target_modules" in note
    changed(tmp_path / "mine", layers_to_transform=0)
    assert open_source(options).notes == ()


def test_the_store_knows_the_adapter(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "adapter_config.json").write_text("{}")
    store = Store()
    plain = wanted_of(str(base), store, GivenOptions())
    wanted = wanted_of(str(base), store, GivenOptions(adapter=str(mine)))
    assert (wanted.name, wanted.adapter) == ("base+mine", str(mine))
    assert wanted.folder != plain.folder
    assert mark_of(wanted.source, wanted.adapter) != mark_of(plain.source)
    with store.begun(wanted):
        store.keep(wanted, "mark")
    assert wanted_of("base+mine", store) == wanted
    assert wanted_of(str(base), store).adapter is None, "the model alone is another entry"
    with pytest.raises(StoreError, match="is not there"):
        wanted_of(str(base), store, GivenOptions(adapter=str(tmp_path / "none")))
