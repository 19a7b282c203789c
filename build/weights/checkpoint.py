"""Reading a Hugging Face checkpoint's directory, tensors one at a time from their files.

Tensors are read with plain reads at their offsets rather than through a memory map, so that this process
holds one tensor in memory and not the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nearfar import strict_json
from nearfar.build.embedding import EMBEDDING_FILES
from nearfar.build.weights.checks import some
from nearfar.build.weights.foreign import folder_is
from nearfar.build.weights.headers import TensorEntry, read_header
from nearfar.checkpoint_files import INDEX, check_no_adapter, weight_files
from nearfar.edge_runtime.text.files import TEMPLATE_FILES, TOKENIZER_FILES, ChatTemplates, find_templates
from nearfar.errors import ArtifactError, CheckpointError
from nearfar.kernels.quantized import Array

TOKENIZER = "tokenizer.json"
CALLS = ("truncation", "padding")
"""Keys of a tokenizer.json that describe how its saver called it, not the model."""
CONFIG_FILES = ("config.json", "generation_config.json")
BESIDE = ("generation_config.json", "special_tokens_map.json", "LICENSE*", *EMBEDDING_FILES, "*/config.json")
"""Files that a build reads in addition to config, tokenizer and weights: sampling defaults, end tokens, the
licence, and the modules of embedding models.
"""
LICENSE_NAMES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
READ_BYTES = 8 << 20
HASH_BYTES = 256 << 10  # bytes of the read buffer, which is reused, so that it stays in the core's cache


class DirectoryCheckpoint:
    """A directory with tensors in files, described by `entries`, and the tokenizer's files; a
    container.Checkpoint. The caller has checked that the files exist and are complete.
    """

    config_file = "config.json"
    lists: tuple[str, ...] = (INDEX,)
    """Files that say where the tensors are."""

    def __init__(
        self, path: Path, name: str, config: dict[str, Any], entries: dict[str, TensorEntry]
    ) -> None:
        self.path = path
        self.name = name
        self.config = config
        self.entries = entries
        self.shapes = {tensor: entry.shape for tensor, entry in entries.items()}
        self.dtypes = {tensor: entry.dtype for tensor, entry in entries.items()}

    @property
    def config_source(self) -> str:
        """See container.Checkpoint."""
        return self.config_file

    @property
    def mismatch_advice(self) -> str:
        """See container.Checkpoint."""
        return (
            f"Check that {self.config_file} and the weights belong together (adapters must be merged first)."
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read a tensor in its own dtype (float32, float16, ml_dtypes.bfloat16, …); with start/stop only
        those rows.

        Raises CheckpointError for an unknown name, or a file that has become shorter.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        shape, offset = entry.shape, entry.offset
        if shape:
            row = math.prod(shape[1:]) * entry.dtype.itemsize
            first, last, _ = slice(start, stop).indices(shape[0])
            shape = (max(0, last - first), *shape[1:])
            offset += first * row
        out = np.empty(shape, entry.dtype)
        self._read_bytes(entry, name, offset, out)
        return out

    def read_into(self, name: str, start: int, out: Array) -> None:
        """Read rows of a tensor from `start` into an array of its dtype, [rows, …] in C order; errors as
        `read`.
        """
        entry = self.entries[name]
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        self._read_bytes(entry, name, entry.offset + start * row, out)

    def read_columns(self, name: str, start: int, stop: int) -> Array:
        """Read columns [start, stop) of a matrix; errors as `read`."""
        entry = self.entries[name]
        rows, columns = entry.shape
        size = entry.dtype.itemsize
        out = np.empty((rows, stop - start), entry.dtype)
        with entry.file.open("rb", buffering=0) as file:
            for row in range(rows if out.size else 0):
                file.seek(entry.offset + (row * columns + start) * size)
                line = out[row].view(np.uint8).data
                if file.readinto(line) != line.nbytes:
                    raise self._short(entry, name)
        return out

    @staticmethod
    def _short(entry: TensorEntry, name: str) -> CheckpointError:
        return CheckpointError(f"{entry.file}: ends inside tensor {name!r}: download or copy it again")

    @staticmethod
    def _read_bytes(entry: TensorEntry, name: str, offset: int, out: Array) -> None:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(offset)
            view = out.reshape(-1).view(np.uint8).data
            done = 0
            while done < out.nbytes:
                got = file.readinto(view[done : done + READ_BYTES])
                if not got:
                    raise DirectoryCheckpoint._short(entry, name)
                done += got

    def sha256(self, stop: threading.Event | None = None) -> str:
        """SHA-256 over names and contents of `files`, in order.

        Setting `stop` from another thread ends the reading early; the result then means nothing.
        """
        digest = hashlib.sha256()
        block = memoryview(bytearray(HASH_BYTES))
        for file in self.files:
            name = file.relative_to(self.path).as_posix()
            digest.update(f"{name}\n{file.stat().st_size}\n".encode())
            with file.open("rb", buffering=0) as stream:
                while (stop is None or not stop.is_set()) and (count := stream.readinto(block)):
                    digest.update(block[:count])
        return digest.hexdigest()

    @cached_property
    def files(self) -> list[Path]:
        """All files that a build reads: config, tokenizer, the files of BESIDE, tensors."""
        patterns = (*self.lists, *BESIDE)
        beside = {file for pattern in patterns for file in self.path.glob(pattern) if file.is_file()}
        return [self.path / self.config_file, *self.tokenizer_files, *sorted(beside), *self.tensor_files]

    @cached_property
    def tensor_files(self) -> list[Path]:
        """The safetensors files, sorted by name."""
        return sorted({entry.file for entry in self.entries.values()})

    @cached_property
    def tokenizer_files(self) -> list[Path]:
        """The files of TOKENIZER_FILES that exist."""
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    @property
    def tokenizer_json(self) -> bytes:
        """The bytes of tokenizer.json."""
        return (self.path / "tokenizer.json").read_bytes()

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, empty where there is none."""
        return read_json(self.path / "tokenizer_config.json", required=False)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, empty where there is none."""
        return read_json(self.path / "generation_config.json", required=False)

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates, from their own files, else from tokenizer_config.json."""
        files = [name for name in TEMPLATE_FILES if (self.path / name).is_file()]
        texts = {name: _read_text(self.path / name) for name in files}
        try:
            return find_templates(self.tokenizer_config, texts)
        except ArtifactError as error:
            raise CheckpointError(f"{self.path / 'tokenizer_config.json'}: {error}") from error

    def write_tokenizer(self, folder: Path) -> list[Path]:
        """Copy the tokenizer's files into a folder: each chat template as a file of its own, tokenizer.json
        without `truncation` and `padding`. Gives the written paths.
        """
        made = {name: text.encode() for name, text in self.chat_templates.files.items()}
        copied = {
            name: (self.path / name).read_bytes() for name in TOKENIZER_FILES if (self.path / name).is_file()
        }
        if TOKENIZER in copied:
            copied[TOKENIZER] = without_calls(copied[TOKENIZER])
        return write_files(folder, made | copied)

    @cached_property
    def license_text(self) -> str | None:
        """The text of the LICENSE file, None where there is none."""
        for name in LICENSE_NAMES:
            if (self.path / name).is_file():
                return (self.path / name).read_text(encoding="utf-8", errors="replace")
        return None


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by name below a folder; gives their paths, sorted."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in sorted(files)]


def open_directory(path: Path, name: str) -> DirectoryCheckpoint:
    """Open a directory as transformers writes it. Raises CheckpointError for anything missing or damaged."""
    if not (path / "config.json").exists() and (what := folder_is(path)):
        raise CheckpointError(f"{path} is {what}")
    check_no_adapter(path, str(path))
    config = read_json(path / "config.json")
    check_tokenizer(path)
    return DirectoryCheckpoint(path, _name_in_manifest(path) or name, config, _entries(path))


def check_tokenizer(path: Path) -> None:
    """Raise CheckpointError where the directory's tokenizer files are missing or not JSON."""
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{path}: tokenizer.json is missing: copy it from the original model, or write it with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    read_json(path / "tokenizer.json")
    read_json(path / "tokenizer_config.json", required=False)


def without_calls(tokenizer_json: bytes) -> bytes:
    """Remove `truncation` and `padding` from a tokenizer.json: settings of its saver's calls, which some
    readers obey. Gives the same bytes where neither is set.
    """
    data = strict_json.loads(tokenizer_json)
    if not isinstance(data, dict) or not any(data.get(key) for key in CALLS):
        return tokenizer_json
    return json.dumps(data | dict.fromkeys(CALLS), ensure_ascii=False).encode()


def _name_in_manifest(path: Path) -> str | None:
    """The model's name from the manifest of an earlier build's mlx target, whose directory is just called
    mlx; None for other checkpoints.
    """
    manifest = read_json(path / "manifest.json", required=False)
    if manifest.get("format") != "nearfar-artifact":
        return None
    model = manifest.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def read_json(path: Path, required: bool = True) -> dict[str, Any]:
    """Read a JSON object; {} for a missing file that is not required. Raises CheckpointError where the file
    holds no object.
    """
    if not path.exists():
        if not required:
            return {}
        raise CheckpointError(
            f"{path.parent}: {path.name} is missing: this is not a whole Hugging Face checkpoint directory"
        )
    text = _read_text(path)
    try:
        value = strict_json.loads(text, infinite=True)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): download or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a JSON {type(value).__name__} where an object is needed: copy it again"
        )
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): download or copy it again") from error


def _entries(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of the directory, sorted by name; through the index where there is one for these files."""
    weight_map = _weight_map(path) if (path / INDEX).is_file() else {}
    indexed = sorted(set(weight_map.values()))
    files = weight_files([file.name for file in path.iterdir() if file.is_file()], indexed)
    if weight_map and files == indexed:
        return _indexed(path, weight_map, files)
    if not files:
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{path}: holds only pickle weights ({', '.join(pickles)}), which can run code when they are "
                "read, so they are rejected. Convert them with transformers: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT, safe_serialization=True)"
            )
        raise CheckpointError(f"{path}: there is no model.safetensors: download the checkpoint again")
    if len(files) > 1:
        raise CheckpointError(
            f"{path}: {len(files)} safetensors files without {INDEX}: fetch the index, or leave only "
            "model.safetensors"
        )
    return dict(sorted(read_header(path / files[0]).items()))


def _weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, from the directory's index."""
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path / INDEX}: has no weight_map from tensors to files: download it again")
    if strange := sorted({file for file in weight_map.values() if Path(file).name != file}):
        raise CheckpointError(f"{path / INDEX}: names files outside the directory: {', '.join(strange)}")
    return weight_map


def _indexed(path: Path, weight_map: Mapping[str, str], files: list[str]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint in several files; the index is checked against the files in both
    directions.
    """
    if missing := [file for file in files if not (path / file).is_file()]:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(files)} files named in {INDEX} are missing: "
            f"{', '.join(missing)}: download them"
        )
    headers = {file: read_header(path / file) for file in files}
    if lost := [f"{tensor} ({file})" for tensor, file in weight_map.items() if tensor not in headers[file]]:
        raise CheckpointError(
            f"{path}: {len(lost)} tensors of {INDEX} are not in the files it names: {some(lost)}: "
            "index and files belong to different checkpoints, download both again"
        )
    entries = {tensor: headers[file][tensor] for tensor, file in weight_map.items()}
    unlisted = [f"{tensor} ({file})" for file in files for tensor in headers[file] if tensor not in entries]
    if unlisted:
        raise CheckpointError(
            f"{path}: {len(unlisted)} tensors are in the files but not in {INDEX}: {some(unlisted)}: "
            "index and files belong to different checkpoints, download both again"
        )
    return dict(sorted(entries.items()))
