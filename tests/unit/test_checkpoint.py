"""Opening checkpoints: tensors are read as they were written, and damage is reported by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.weights.checks import check_finite, check_tensors
from nearfar.build.weights.opening import open_checkpoint
from nearfar.build.weights.quantized.contract import RequiredTensor
from nearfar.checkpoint_files import INDEX
from nearfar.errors import CheckpointError
from nearfar.store.naming import mark_of
from tests.shared_data import shared_data

A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.array([1.5, -2, 3], ml_dtypes.bfloat16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint in one file."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "hello"}')
    save_file({"a": A, "b": B}, path / "model.safetensors")
    return path


@pytest.fixture
def sharded(model: Path) -> Path:
    """The model with its weights in two files."""
    (model / "model.safetensors").unlink()
    save_file({"a": A}, model / "one.safetensors")
    save_file({"b": B}, model / "two.safetensors")
    write_index(model, {"a": "one.safetensors", "b": "two.safetensors"})
    return model


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(path: Path | str, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for part in parts:
        assert part in str(caught.value)


def test_reads_what_was_written(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert checkpoint.name == "tiny"
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.shapes == {"a": (4, 3), "b": (3,)}
    assert checkpoint.dtypes["b"] == ml_dtypes.bfloat16
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("a", 1, 3), A[1:3])
    np.testing.assert_array_equal(checkpoint.read("b"), B)
    assert checkpoint.chat_templates.plain == "hello"
    assert checkpoint.license_text is None
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        checkpoint.read("c")


def test_sharded_equals_single(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("b"), B)
    assert [file.name for file in checkpoint.tensor_files] == ["one.safetensors", "two.safetensors"]


def test_chat_template_file_wins_and_lists_have_a_default(model: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(model).chat_templates.plain == "d"
    (model / "chat_template.jinja").write_text("from the file")
    (model / "LICENSE").write_text("MIT")
    checkpoint = open_checkpoint(model)
    assert checkpoint.chat_templates.plain == "from the file"
    assert checkpoint.license_text == "MIT"


def test_sha256_changes_with_one_weight(model: Path) -> None:
    before = open_checkpoint(model).sha256()
    assert before == open_checkpoint(model).sha256()
    save_file({"a": A + np.float32(1), "b": B}, model / "model.safetensors")
    assert open_checkpoint(model).sha256() != before


READ = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "LICENSE", "modules.json", "1_Pooling/config.json", INDEX,
    "sentence_bert_config.json", "config_sentence_transformers.json",
)  # fmt: skip
"""Files that a build reads in addition to the tensors."""


@pytest.mark.parametrize("name", READ)
def test_whatever_a_build_reads_is_of_the_checkpoint_s_digest_and_mark(sharded: Path, name: str) -> None:
    """Two artifacts with different end tokens must not name one source, and a changed checkpoint must be
    built again.
    """
    file = sharded / name
    file.parent.mkdir(exist_ok=True)
    told = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(told))
    before = open_checkpoint(sharded).sha256(), mark_of(str(sharded))
    assert before == (open_checkpoint(sharded).sha256(), mark_of(str(sharded)))
    file.write_text(json.dumps({**told, "said": "more"}))
    after = open_checkpoint(sharded).sha256(), mark_of(str(sharded))
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_the_mark_of_a_part_is_that_of_all_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m[1]-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in (*parts, tmp_path / "m[1]-00001-of-00003.gguf"):
        part.write_bytes(b"1")
    before = mark_of(str(parts[0]))
    assert before == mark_of(str(parts[1]))
    (tmp_path / "m[1]-00001-of-00003.gguf").write_bytes(b"another model's")
    assert mark_of(str(parts[0])) == before
    parts[1].write_bytes(b"22")
    assert mark_of(str(parts[0])) != before


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_truncated(model: Path, kept: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(model, "model.safetensors", "truncated")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    refused(sharded, "1 of 2 files", "two.safetensors")


def test_index_and_files_disagree(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    refused(sharded, "1 tensors", "c (two.safetensors)")
    save_file({"b": B, "d": B}, sharded / "two.safetensors")
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors"})
    refused(sharded, "not in " + INDEX, "d (two.safetensors)")
    write_index(sharded, {"a": "../one.safetensors"})
    refused(sharded, "outside the directory")


def test_pickles_are_refused_with_the_way_to_convert(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "there is no model.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    refused(model, "pytorch_model.bin", "pickle", "save_pretrained")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_and_unreadable_json(model: Path, name: str) -> None:
    (model / name).write_text("{not json")
    refused(model, name, "not valid JSON")
    (model / name).write_text("[1]")
    refused(model, name, "list")
    (model / name).unlink()
    refused(model, name, "is missing")


def test_neither_directory_nor_hub_id(tmp_path: Path) -> None:
    refused(str(tmp_path / "nowhere"), "nowhere is not there")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is a file")


def test_damaged_header(model: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 47]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    refused(model, "'a' [4, 3] F32 should be 48 bytes")
    header = json.dumps({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(model, "F4")


def test_every_difference_is_named_at_once(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    check_tensors(checkpoint, {"a": RequiredTensor((4, 3)), "b": RequiredTensor((3,))})
    check_tensors(checkpoint, {"a": RequiredTensor((4, 3))}, ignorable=["[bc]"])
    with pytest.raises(CheckpointError) as caught:
        check_tensors(
            checkpoint,
            {
                "a": RequiredTensor((3, 4), ("int8", "uint8")),
                "c": RequiredTensor((1,)),
                "d": RequiredTensor((2, 2)),
            },
        )
    for part in ("2 missing: c [1], d [2, 2]", "1 extra: b [3]", "1 misshapen: a is [4, 3], not [3, 4]"):
        assert part in str(caught.value)
    assert "1 of another dtype: a is float32, not int8 or uint8" in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_check_finite(dtype: type) -> None:
    array = np.array([[1, -2, 3], [0, 6e-5, 5]], dtype)
    check_finite("w", array)
    array[1, 0], array[1, 2] = np.nan, -np.inf
    with pytest.raises(CheckpointError, match=r"'w' holds 2 NaN or Inf of 6 values, the first at \[1, 0\]"):
        check_finite("w", array)


def test_real_checkpoint() -> None:
    checkpoint = open_checkpoint(shared_data("models/classics-1M"))
    assert checkpoint.shapes["model.embed_tokens.weight"][0] == checkpoint.config["vocab_size"]
    for name in checkpoint.shapes:
        check_finite(name, checkpoint.read(name))


def header_file(path: Path, header: str | dict[str, Any], data: bytes = bytes(48)) -> None:
    """Write model.safetensors with this header."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(start: int, stop: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape or [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": tensor(0, 32), "b": tensor(16, 48)}, "tensor 'b' at byte .* overlaps"),
        ({"a": tensor(0, 48), "b": tensor(0, 48)}, "overlaps"),
        ({"a": tensor(0, 16), "b": tensor(32, 48)}, "leaves a gap"),
        ({"a": tensor(0, 32)}, "16 bytes follow the last tensor"),
        ({}, "48 bytes follow"),
        (f'{{"a": {json.dumps(tensor(0, 48))}, "a": {json.dumps(tensor(0, 48))}}}', "'a' is given twice"),
        ({"a": tensor(0, 48, [-12])}, "no valid dtype, shape and data_offsets"),
        ({"a": tensor(0, 48, [-3, -4])}, "no valid dtype, shape and data_offsets"),
        ({"a": {**tensor(0, 48), "shape": [12.0]}}, "no valid dtype, shape and data_offsets"),
        ({"a": {**tensor(0, 48), "shape": [True, 12]}}, "no valid dtype, shape and data_offsets"),
        ({"a": {**tensor(0, 48), "data_offsets": [0.0, 48.0]}}, "no valid dtype, shape and data_offsets"),
        ({"a": {**tensor(0, 48), "data_offsets": [0, 48, 96]}}, "no valid dtype, shape and data_offsets"),
        ({"a": {**tensor(0, 48), "dtype": ["F32"]}}, "no valid dtype, shape and data_offsets"),
        ({"a": [1]}, "no valid dtype, shape and data_offsets"),
        ({"a": tensor(0, 48), "__metadata__": {"format": 1}}, "__metadata__ .* not an object of strings"),
        (
            '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 48]}}',
            "Infinity is not a JSON number",
        ),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_header_that_does_not_tile_the_file_is_refused(model: Path, header: Any, said: str) -> None:
    header_file(model, header)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 3, "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', "\udc80"])
def test_broken_json_is_named_with_its_file(model: Path, name: str, text: str) -> None:
    (model / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=name):
        _ = open_checkpoint(model).generation_config


def test_a_stray_manifest_does_no_harm(model: Path) -> None:
    (model / "manifest.json").write_text('{"format": "nearfar-artifact", "model": []}')
    assert open_checkpoint(model).name == "tiny"


SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sample-model"


def edited(root: Path, file: str, **changes: object) -> None:
    values = json.loads((root / file).read_text()) if (root / file).exists() else {}
    (root / file).write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: (root / "tokenizer.json").write_text("{}"), "tokenizer.json: no tokenizer"),
        (lambda root: edited(root, "tokenizer_config.json", chat_template="{% for x in"), "template"),
        (lambda root: edited(root, "tokenizer_config.json", chat_template=[1]), "chat_template is"),
        (
            lambda root: edited(root, "tokenizer_config.json", chat_template=[{"name": "default"}]),
            "chat_template is",
        ),
        (
            lambda root: (root / "chat_template.jinja").write_bytes(b"\xff"),
            "chat_template.jinja: cannot be read",
        ),
        (
            lambda root: edited(root, "generation_config.json", eos_token_id=[1, -1]),
            "generation_config.json: eos_token_id",
        ),
        (
            lambda root: edited(root, "generation_config.json", eos_token_id=10**6),
            "generation_config.json: eos_token_id",
        ),
    ],
)
def test_what_the_runtimes_could_not_open_is_refused_first(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    root = Path(shutil.copytree(SAMPLE, tmp_path / "model"))
    (root / "chat_template.jinja").unlink(missing_ok=True)
    change(root)
    with pytest.raises(CheckpointError, match=said):
        build(BuildOptions(str(root), tmp_path / "out", targets=("mlx",)))
    assert not (tmp_path / "out" / "mlx").exists()
