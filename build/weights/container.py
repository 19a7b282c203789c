"""The interface of checkpoints, independent of how their bytes are stored; each container is one file.

A container (a directory of safetensors, a GGUF file, MLC's shards) finds tensors and names them;
nearfar.build.weights.quantized says how a matrix is quantized within its tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nearfar.edge_runtime.text.files import ChatTemplates
from nearfar.kernels.quantized import Array


class Stored(Protocol):
    """A tensor's properties before it is read."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in which the tensor is stored."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which the tensor is stored."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file."""
        ...


class Checkpoint(Protocol):
    """An opened checkpoint, whose files exist and are complete; its tensors have Hugging Face's names."""

    @property
    def path(self) -> Path:
        """The opened path, for messages; if it is a folder, files may be copied from it."""
        ...

    @property
    def name(self) -> str:
        """The model's name, for the manifest."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as transformers writes it, or an equivalent made from other metadata."""
        ...

    @property
    def config_source(self) -> str:
        """What states the config, for messages: config.json, or the metadata of a file."""
        ...

    @property
    def mismatch_advice(self) -> str:
        """A sentence that says what to do where the tensors are not those that the config describes."""
        ...

    @property
    def entries(self) -> Mapping[str, Stored]:
        """Every tensor before it is read, sorted by name."""
        ...

    @property
    def tokenizer_json(self) -> bytes:
        """tokenizer.json, as the tokenizers library reads it."""
        ...

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, empty where there is none."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, empty where there is none."""
        ...

    @property
    def chat_templates(self) -> ChatTemplates: ...

    @property
    def license_text(self) -> str | None:
        """The licence's text, None where there is none."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read a tensor in its own dtype; with start/stop only those rows. Raises CheckpointError where it
        cannot be read.
        """
        ...

    def read_into(self, name: str, start: int, out: Array) -> None:
        """Read rows of a tensor from `start` into an array of its dtype, [rows, …] in C order."""
        ...

    def read_columns(self, name: str, start: int, stop: int) -> Array:
        """Read columns [start, stop) of a matrix, in its own dtype and C order."""
        ...

    def sha256(self, stop: threading.Event | None = None) -> str:
        """SHA-256 of all files that a build reads. Setting `stop` ends it early, with an invalid result."""
        ...

    def write_tokenizer(self, folder: Path) -> list[Path]:
        """Write the tokenizer's files into a folder, each chat template as a file of its own; gives the
        written paths.
        """
        ...
