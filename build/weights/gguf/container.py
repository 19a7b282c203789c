"""A GGUF file, or its split parts, as a checkpoint: tensors with the names and values of transformers."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.build.weights.checkpoint import HASH_BYTES, DirectoryCheckpoint, write_files
from nearfar.build.weights.gguf.config import drafting_layers, read_config
from nearfar.build.weights.gguf.header import GgufTensor, Header, is_gguf, read_header
from nearfar.build.weights.gguf.names import (
    FLAT,
    FREQUENCIES,
    expert_names,
    heads_of,
    in_transformers,
    is_one_more,
    pair_rows,
    tensor_name,
)
from nearfar.build.weights.gguf.tokenizer import GgufTokenizer, read_tokenizer
from nearfar.edge_runtime.text.files import ChatTemplates
from nearfar.errors import CheckpointError
from nearfar.kernels.quantized import Array
from nearfar.step.reading import DRAFTS

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^.]*)?")
MOST_PARTS = 10_000
SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of generation_config.json, and the metadata keys after `general.sampling.` that they come from."""


class GgufCheckpoint(DirectoryCheckpoint):
    """See nearfar.build.weights.container.Checkpoint. `tensors`: the stored tensors by transformers' names;
    rows of quantized ones are read as bytes.
    """

    config_source = "its metadata"
    mismatch_advice = "Download the file again, or convert the model again with a recent llama.cpp."

    def __init__(self, name: str, headers: list[Header], tensors: Mapping[str, GgufTensor]) -> None:
        first = headers[0]
        config = read_config(first, tensors)
        self._architecture = str(first.metadata["general.architecture"])
        self._tokenizer: GgufTokenizer = read_tokenizer(first.file, first.metadata, config["vocab_size"])
        self._license = first.metadata.get("general.license")
        wanted = {name: first.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
        self._sampling = {name: _shortest(value) for name, value in wanted.items() if value is not None}
        self._files = [header.file for header in headers]
        layers = int(config["num_hidden_layers"]), drafting_layers(first)
        self.tensors = self._named(first.file, tensors, *layers)
        entries = {name: tensor.entry for name, tensor in sorted(self.tensors.items())}
        super().__init__(first.file, name, config, entries)

    def _named(
        self, file: Path, tensors: Mapping[str, GgufTensor], layers: int, drafting: int
    ) -> dict[str, GgufTensor]:
        named: dict[str, GgufTensor] = {}
        for name, tensor in tensors.items():
            if name in FREQUENCIES:
                continue
            ours = tensor_name(self._architecture, name, layers, drafting)
            each = expert_names(self._architecture, name)
            if each and len(tensor.shape) > 1 and not ours.startswith(DRAFTS):
                held = {
                    one.format(expert): part
                    for expert in range(tensor.shape[0])
                    for one, part in zip(each, _runs(name, tensor.part(expert), len(each)), strict=True)
                }
            else:
                held = {ours: _flat(tensor) if ours.endswith(FLAT) else _as_matrix(name, tensor)}
            if both := named.keys() & held.keys():
                raise CheckpointError(
                    f"{file}: two tensors are {min(both)!r}, one of them {name!r}: convert it again"
                )
            named |= held
        return named

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read rows in transformers' order, norms as transformers stores them; see Checkpoint."""
        heads = heads_of(self._architecture, name, self.config)
        if heads is None or name not in self.tensors:
            found = super().read(name, start, stop)
            if is_one_more(self._architecture, name):
                return np.asarray(found.astype(np.float32) - np.float32(1), np.float32)
            return in_transformers(name, found)
        rows = self.tensors[name].shape[0]
        head = self.config["head_dim"]
        if rows != heads * head:
            raise CheckpointError(
                f"{self.path}: {name!r} has {rows:,} rows, not {head:,} for each of {heads} heads: convert "
                "it again"
            )
        first, last, _ = slice(start, stop).indices(rows)
        around = first // head * head, -(-last // head) * head
        stored = super().read(name, *around)
        return np.ascontiguousarray(stored[pair_rows(first, last, head) - around[0]])

    def read_into(self, name: str, start: int, out: Array) -> None:
        """See Checkpoint."""
        out[...] = self.read(name, start, start + len(out))

    def read_columns(self, name: str, start: int, stop: int) -> Array:
        """See Checkpoint."""
        return np.ascontiguousarray(self.read(name)[:, start:stop])

    def sha256(self, stop: threading.Event | None = None) -> str:
        """SHA-256 of the file's size and content, part by part; file names do not count."""
        digest = hashlib.sha256()
        block = memoryview(bytearray(HASH_BYTES))
        for file in self._files:
            digest.update(f"{file.stat().st_size}\n".encode())
            with file.open("rb", buffering=0) as stream:
                while (stop is None or not stop.is_set()) and (count := stream.readinto(block)):
                    digest.update(block[:count])
        return digest.hexdigest()

    @property
    def tokenizer_json(self) -> bytes:
        """tokenizer.json, made from the metadata."""
        return self._tokenizer.json

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json with the special tokens."""
        return self._tokenizer.config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The end tokens, and the file's sampling defaults (general.sampling.*)."""
        ends = {"eos_token_id": list(self._tokenizer.ends)} if self._tokenizer.ends else {}
        return ends | self._sampling

    @cached_property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates in the file's metadata."""
        return self._tokenizer.templates

    def write_tokenizer(self, folder: Path) -> list[Path]:
        """See Checkpoint."""
        files = {
            "tokenizer.json": self._tokenizer.json,
            "tokenizer_config.json": json.dumps(self._tokenizer.config, ensure_ascii=False).encode(),
        }
        files |= {name: text.encode() for name, text in self.chat_templates.files.items()}
        return write_files(folder, files)

    @cached_property
    def license_text(self) -> str | None:
        """The name of the licence: the file has no text of it."""
        return self._license if isinstance(self._license, str) and self._license else None


def _runs(name: str, tensor: GgufTensor, count: int) -> list[GgufTensor]:
    """The tensors of equally many rows that lie one after the other in a tensor of one expert."""
    rows = tensor.shape[0]
    if count == 1:
        return [tensor]
    if rows % count:
        raise CheckpointError(
            f"{tensor.entry.file}: {name!r} has {rows:,} rows, which are not {count} equal parts"
        )
    shape, held = (count, rows // count), tensor.entry
    whole = replace(
        tensor,
        shape=(*shape, *tensor.shape[1:]),
        entry=replace(held, shape=(*shape, *held.shape[1:])),
    )
    return [whole.part(index) for index in range(count)]


def _flat(tensor: GgufTensor) -> GgufTensor:
    """A tensor of floats as a vector."""
    if tensor.type.dtype is None:
        return tensor  # another shape than expected is reported
    shape = (math.prod(tensor.shape),)
    return replace(tensor, shape=shape, entry=replace(tensor.entry, shape=shape))


def claims_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a directory with one that has no config.json."""
    if path.is_file():
        return is_gguf(path)
    return path.is_dir() and not (path / "config.json").exists() and bool(_inside(path))


def open_gguf(path: Path, name: str) -> GgufCheckpoint:
    """Open a file, all parts of a split file, or the file of a directory. Raises CheckpointError for damaged
    files.
    """
    if path.is_dir():
        path = _only(path)
        name = path.name
    headers = _parts(path)
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        if double := sorted(set(tensors) & set(header.tensors)):
            raise CheckpointError(
                f"{header.file}: tensor {double[0]!r} is in another part, too: download all"
            )
        tensors |= header.tensors
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if type(total) is not int or total != len(tensors):
        raise CheckpointError(f"{path}: its parts have {len(tensors)} tensors of {total}: download all again")
    return GgufCheckpoint(stem_of(name), headers, tensors)


def stem_of(name: str) -> str:
    """The name of a model, from the name of its file or of one of its parts."""
    found = PART.fullmatch(name)
    return found[1] if found else name.removesuffix(".gguf")


def _inside(path: Path) -> list[Path]:
    return [file for file in sorted(path.iterdir()) if file.is_file() and is_gguf(file)]


def _only(path: Path) -> Path:
    """The one file of a directory, or the first of its parts."""
    files = _inside(path)
    stems = {found[1] if (found := PART.fullmatch(file.name)) else file.name for file in files}
    if len(stems) > 1:
        raise CheckpointError(f"{path}: there are several GGUF files: name one of {', '.join(sorted(stems))}")
    return files[0]


def _parts(path: Path) -> list[Header]:
    """The headers of a file and of the parts beside it, in order."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise CheckpointError(f"{path}: split.count is {count!r}; expected at most {MOST_PARTS}")
    if count <= 1:
        return [header]
    found = PART.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} parts, but is not called so: name it NAME-00001-of-{count:05d}.gguf, "
            "as it was"
        )
    files = [
        path.with_name(f"{found[1]}-{number:05d}-of-{count:05d}{found[4] or ''}")
        for number in range(1, count + 1)
    ]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{path}: parts are missing: {', '.join(missing[:10])}: download them")
    headers = [header if file == path else read_header(file) for file in files]
    for number, part in enumerate(headers):
        if not _is(part, "split.no", number) or not _is(part, "split.count", count):
            raise CheckpointError(f"{part.file}: is not part {number + 1} of {count}: download it again")
    return headers


def _as_matrix(name: str, tensor: GgufTensor) -> GgufTensor:
    """The tensor of a shared expert's gate as the matrix of one row that transformers has; others unchanged.
    The converter leaves dimensions of 1 out.
    """
    if not name.endswith("ffn_gate_inp_shexp.weight") or len(tensor.shape) != 1:
        return tensor
    entry = replace(tensor.entry, shape=(1, *tensor.entry.shape))
    return replace(tensor, shape=(1, *tensor.shape), entry=entry)


def _is(part: Header, key: str, number: int) -> bool:
    found = part.metadata.get(key)
    return type(found) is int and found == number


def _shortest(value: Any) -> Any:
    """A float32 as its shortest decimal: 0.6, not 0.6000000238."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
