"""Recognizes paths that are not checkpoints: other formats by their content, and what to take instead.

Sources of the marks: PyTorch's zip of a pickle (torch/serialization), HDF5's signature, FlatBuffers' file
identifiers of LiteRT ("TFL") and ExecuTorch ("ET12"), GGML's magic numbers before GGUF, peft's and diffusers'
file names.
"""

from __future__ import annotations

import struct
import tarfile
import zipfile
from pathlib import Path

from nearfar.checkpoint_files import ADAPTER, adapter_is

ORIGINAL = "take the original checkpoint in safetensors, or a GGUF file"
SAVED = "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
HEAD_BYTES = 16
OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""The magic numbers ggml, ggmf, ggjt and ggla as little-endian 32-bit numbers."""

MARKS: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", f"weights of Keras (HDF5): load them with transformers and save them, {SAVED}"),
    (4, b"TFL", f"a LiteRT (TensorFlow Lite) model, whose graph is compiled already: {ORIGINAL}"),
    (4, b"ET12", f"an ExecuTorch program, which is compiled already: {ORIGINAL}"),
    (0, b"LITERTLM", f"a LiteRT-LM bundle, which is compiled already: {ORIGINAL}"),
    (0, b"\x1f\x8b", "a gzip archive: unpack it, and name the directory with config.json"),
    *((0, magic, f"a GGML file older than GGUF: {ORIGINAL}") for magic in OLD_GGML),
    *(
        (0, b"\x80" + bytes([n]), f"a pickle, which can run code when it is read: {ORIGINAL}")
        for n in range(2, 6)
    ),
)
"""Offset and bytes of a mark in a file, and the format that it marks."""

SUFFIXES = {
    ".onnx": f"an ONNX graph: {ORIGINAL} (nearfar build --target onnx writes a graph of it)",
    ".mlmodel": f"a Core ML model, which is compiled already: {ORIGINAL}",
    ".engine": f"a TensorRT engine, which is compiled already: {ORIGINAL}",
    ".plan": f"a TensorRT engine, which is compiled already: {ORIGINAL}",
}
"""Formats without a mark in their bytes, by suffix."""

BUILT = (
    "what nearfar build wrote, an artifact and no checkpoint: nearfar run, serve and web take it as it is; "
    "build from the checkpoint that it was made of"
)
FOLDERS: tuple[tuple[str, str], ...] = (
    ("manifest.json", BUILT),
    ("*/manifest.json", BUILT),
    ("model_index.json", "a diffusers pipeline, which makes pictures: nearfar runs language models"),
    ("params.json", "weights as Meta and Mistral publish them: take the repository of the same model that "
     "has config.json, or convert it with transformers"),
    ("*.nemo", f"a NeMo checkpoint: {ORIGINAL}"),
    ("openvino_model.xml", f"an OpenVINO export: {ORIGINAL}"),
    ("*.mlpackage", f"a Core ML export: {ORIGINAL}"),
    ("*.engine", f"TensorRT engines: {ORIGINAL}"),
    ("*.onnx", SUFFIXES[".onnx"]),
    ("onnx/*.onnx", SUFFIXES[".onnx"]),
    ("saved_model.pb", f"a TensorFlow SavedModel: {ORIGINAL}"),
)  # fmt: skip
"""Files that identify a folder, in order, and what the folder then is."""


def file_is(path: Path) -> str | None:
    """The format of a file, and what to take instead; None for an unknown format."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None
    for offset, mark, what in MARKS:
        if head[offset : offset + len(mark)] == mark:
            return what
    return _zip(path) or _safetensors(head, path) or _tar(path) or SUFFIXES.get(path.suffix.lower())


def folder_is(path: Path) -> str | None:
    """The format of a folder without config.json, and what to take instead; None for an unknown format."""
    there = sorted(path.iterdir())
    if not there:
        return "an empty folder"
    if (path / ADAPTER).is_file():
        return adapter_is(path / ADAPTER)
    for pattern, what in FOLDERS:
        if any(path.glob(pattern)):
            return what
    below = [child.name for child in there if child.is_dir() and (child / "config.json").is_file()]
    if below:
        return f"no checkpoint itself, but {', '.join(below[:4])} below it is: name {path / below[0]}"
    if (path / "tokenizer.json").is_file() and not any(path.glob("*.safetensors")):
        return "a tokenizer without a model: config.json and the safetensors files are missing"
    return None


def _zip(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        return (
            "weights as PyTorch pickles them, which can run code when they are read: load them with "
            f"transformers and save them, {SAVED}"
        )
    return "a zip archive: unpack it, and name the directory with config.json"


def _tar(path: Path) -> str | None:
    if not tarfile.is_tarfile(path):
        return None
    nemo = path.suffix == ".nemo"
    return f"a NeMo checkpoint: {ORIGINAL}" if nemo else "a tar archive: unpack it, and name its directory"


def _safetensors(head: bytes, path: Path) -> str | None:
    """Recognize a safetensors file by its header (64 bits of length, then a JSON object), and say what to do
    with it.
    """
    if len(head) < HEAD_BYTES or head[8:9] != b"{" or struct.unpack("<Q", head[:8])[0] > path.stat().st_size:
        return None
    return (
        f"tensors alone: name the directory that holds them with config.json and tokenizer.json, "
        f"{path.parent} if it does"
    )
