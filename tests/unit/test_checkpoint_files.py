"""Which files of a checkpoint are its weights, and what is rejected before any of them is downloaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nearfar.build.weights.hub import download
from nearfar.build.weights.opening import open_checkpoint
from nearfar.checkpoint_files import INDEX, SINGLE, weight_files
from nearfar.errors import CheckpointError, NearfarError
from nearfar.fallback_server.engines.opening import LOOKED_AT, EngineOptions, _fetched, open_engine
from tests.support import tiny
from tests.support.commands import nearfar
from tests.support.hub import Hub, hub, talk_to

PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MISTRAL = ["consolidated.safetensors", "vision/model.safetensors"]


@pytest.mark.parametrize(
    ("names", "indexed", "held"),
    [
        ([SINGLE], [], [SINGLE]),
        ([*MISTRAL, SINGLE], [], [SINGLE]),
        ([*MISTRAL, *PARTS], PARTS, PARTS),
        ([*MISTRAL, *PARTS, SINGLE], PARTS, PARTS),
        ([SINGLE], PARTS, [SINGLE]),  # the index belongs to another upload
        ([SINGLE, PARTS[0]], PARTS, PARTS),  # the download was cut: the error names what is missing
        ([SINGLE], [SINGLE], [SINGLE]),
        (["other.safetensors", "onnx/x.safetensors"], [], ["other.safetensors"]),
        (["README.md"], [], []),
        ([], PARTS, PARTS),
    ],
)
def test_the_files_that_hold_the_weights(names: list[str], indexed: list[str], held: list[str]) -> None:
    assert weight_files([*names, "config.json"], indexed) == held


def test_an_index_of_another_upload_is_not_asked(tmp_path: Path) -> None:
    write(tmp_path)
    tensor = np.ones((2, 2), np.float32)
    save_file({"a": tensor}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": PARTS[0], "b": PARTS[1]}}))
    assert list(open_checkpoint(tmp_path).entries) == ["a"]
    save_file({"a": tensor}, tmp_path / PARTS[0])
    with pytest.raises(CheckpointError, match=f"1 of 2 files named in {INDEX} are missing: {PARTS[1]}"):
        open_checkpoint(tmp_path)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Hub]]:
    """A repository `some/model` of the hub, laid out as Mistral's are, and the hub."""
    folder = tmp_path / "repository"
    write(folder)
    for name in (*MISTRAL, *PARTS):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"weights " + name.encode())
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", PARTS, strict=True))}))
    with hub({"some/model": folder}) as at:
        talk_to(at, tmp_path / "cache", monkeypatch)
        yield folder, at


def test_the_same_weights_are_not_fetched_twice(repository: tuple[Path, Hub]) -> None:
    _, at = repository
    for fetch in (download, _fetched):
        folder = fetch("some/model")
        assert sorted(file.name for file in folder.rglob("*.safetensors")) == PARTS
    assert {name for name in at.fetched() if name.endswith(".safetensors")} == set(PARTS)


def test_a_mirror_without_entity_tags_is_told(
    repository: tuple[Path, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    known = huggingface_hub.get_hf_file_metadata
    monkeypatch.setattr("nearfar.hub.OWN", 1)
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda url: dataclasses.replace(known(url), etag=None)
    )
    with pytest.raises(CheckpointError, match="no entity tag"):
        download("some/model")


BITNET = {"quant_method": "bitnet"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LORA = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": {"model_type": "qwen3_next"}}, "model_type is 'qwen3_next'"),
        ({"config.json": {"rope_scaling": {"type": "wobbly", "factor": 2.0}}}, "wobbly"),
        ({"config.json": {"hidden_act": "relu"}}, 'hidden_act is "relu"'),
        ({"config.json": {"attention_bias": 7}}, "attention_bias"),
        ({"config.json": {"quantization_config": BITNET}}, 'quantized by "bitnet"'),
        ({"modules.json": [POOLING, DENSE], "1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, "Dense"),
        ({"modules.json": [POOLING], "1_Pooling/config.json": {"pooling_mode": "mean"}}, "pooling is mean"),
        ({"generation_config.json": {"temperature": "hot"}}, "temperature"),
        ({"chat_template.jinja": "{% for"}, "chat template cannot be read"),
        ({"tokenizer_config.json": {"chat_template": [1]}}, "chat_template is"),
        ({"adapter_config.json": LORA}, "a LoRA adapter of some/base"),
        ({"adapter_config.json": LORA, "config.json": None}, "the model of the adapter"),
        ({"adapter_config.json": {**LORA, "use_dora": True}, "config.json": None}, "use_dora is true"),
        ({"adapter_config.json": {"peft_type": "LORA"}, "config.json": None}, "names no model"),
    ],
)
def test_what_settings_say_is_refused_before_weights_are_fetched(
    repository: tuple[Path, Hub], tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    folder, at = repository
    write(folder, files)
    made = nearfar("build", "some/model", "--target", "cpu", "-o", tmp_path / "out")
    assert made.returncode == 1
    assert said in " ".join(made.stderr.split())
    assert "some/model" in made.stderr
    assert not any(name.endswith((".safetensors", "tokenizer.json")) for name in at.fetched())
    here = nearfar("build", folder, "--target", "cpu", "-o", tmp_path / "out")
    assert said in " ".join(here.stderr.split()), "the same words for a folder of this machine"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_config.json": LORA}, "a LoRA adapter of some/base"),
        ({"chat_template.jinja": "{% strange %}"}, "the chat template cannot be read"),
        ({"config.json": {"model_type": "lfm2", "conv_L_cache": 3}}, "layers that keep a state"),
    ],
)
async def test_the_server_refuses_before_weights_are_fetched_or_loaded(
    repository: tuple[Path, Hub], files: dict[str, Any], said: str
) -> None:
    folder, at = repository
    write(folder, files)
    for given in ("some/model", str(folder)):
        with pytest.raises(NearfarError, match=said):
            await open_engine([given], "torch", EngineOptions())
    assert at.fetched() <= set(LOOKED_AT)


def write(folder: Path, files: dict[str, Any] | None = None) -> None:
    """Write the small files of a checkpoint, with a changed config.json or (None) without one, and other
    files.
    """
    folder.mkdir(exist_ok=True)
    given = {"config.json": {}, "tokenizer_config.json": {}, **(files or {})}
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in given.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is None:
            (folder / name).unlink()
        elif isinstance(content, str):
            (folder / name).write_text(content)
        else:
            (folder / name).write_text(
                json.dumps({**tiny.CONFIG, **content} if name == "config.json" else content)
            )
