"""Unsupported formats are rejected by name, with an alternative, before anything is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nearfar.build.weights.opening import open_checkpoint
from nearfar.errors import CheckpointError
from tests.shared_data import shared_data
from tests.support.late import late

torch = late("torch")

STORIES = ("models", "stories260K")


def pickled(path: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, path)


def legacy_pickled(path: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, path, _use_new_zipfile_serialization=False)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")


def archived(path: Path) -> None:
    (path.parent / "model_config.yaml").write_text("a: 1")
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent / "model_config.yaml")


def starting(mark: bytes) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        path.write_bytes(mark + bytes(64))

    return made


def copied(path: Path) -> None:
    path.write_bytes(shared_data(*STORIES, "model.safetensors").read_bytes())


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pytorch_model.bin": (pickled, "PyTorch pickles them, which can run code"),
    "old.pth": (legacy_pickled, "a pickle, which can run code"),
    "model.safetensors": (copied, "tensors alone: name the directory"),
    "tf_model.h5": (starting(b"\x89HDF\r\n\x1a\n"), "Keras"),
    "model.tflite": (starting(b"\x1c\0\0\0TFL3"), "LiteRT"),
    "model.pte": (starting(b"\x1c\0\0\0ET12"), "ExecuTorch"),
    "ggml-model.bin": (starting(b"tjgg"), "older than GGUF"),
    "model.onnx": (starting(b"\x08\x08"), "--target onnx"),
    "model.zip": (zipped, "zip archive: unpack it"),
    "model.nemo": (archived, "NeMo"),
    "notes.txt": (starting(b"hello"), "no GGUF file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    make, said = FILES[name]
    make(tmp_path / name)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path / name)
    assert said in str(refused.value)
    assert "A checkpoint is a GGUF file, or a directory with config.json" in str(refused.value)


FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "an empty folder"),
    "adapter": (
        {"adapter_config.json": json.dumps({"base_model_name_or_path": "meta/base"}), "tokenizer.json": "{}"},
        "a LoRA adapter of meta/base: nearfar build MODEL --adapter FOLDER merges it",
    ),
    "adapter of nothing": ({"adapter_config.json": "["}, "a LoRA adapter: nearfar build MODEL --adapter"),
    "pictures": ({"model_index.json": "{}", "unet/config.json": "{}"}, "a diffusers pipeline"),
    "published": ({"params.json": "{}", "consolidated.00.pth": ""}, "as Meta and Mistral publish them"),
    "exported": ({"onnx/model.onnx": ""}, "an ONNX graph"),
    "above": ({"one/config.json": "{}", "README.md": ""}, "but one below it is: name "),
    "words": ({"tokenizer.json": "{}"}, "a tokenizer without a model"),
    "other": ({"README.md": ""}, "config.json is missing"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    files, said = FOLDERS[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("command", ["build", "run"])
def test_the_commands_say_so(command: str, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "model_index.json").write_text("{}")
    asked = {"build": ["--target", "mlx", "-o", tmp_path / "out"], "run": ["Hello"]}[command]
    done = subprocess.run(
        [sys.executable, "-m", "nearfar", command, tmp_path / "pictures", *asked],
        env=os.environ | {"NEARFAR_HOME": str(tmp_path / "home")}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pictures is a diffusers pipeline, which makes pictures" in " ".join(done.stderr.split())
