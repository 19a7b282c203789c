"""What a build asks of a checkpoint, however its bytes lie: one file a container implements it.

A container (a directory of safetensors, a GGUF file, MLC's shards) says where tensors are and what they are
called; how a matrix is quantized within its tensors is told by nearfar.build.weights.packed.
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
    """What is known of a tensor before it is read."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """As it is stored."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is stored."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the tensor in the file."""
        ...


class Checkpoint(Protocol):
    """An opened checkpoint, whose files are there and whole; its tensors have Hugging Face's names."""

    @property
    def path(self) -> Path:
        """What was opened, for messages, and where files may lie that are copied as they are."""
        ...

    @property
    def name(self) -> str:
        """The model's name, for the manifest."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as transformers writes it, or what says the same."""
        ...

    @property
    def entries(self) -> Mapping[str, Stored]:
        """Every tensor, sorted by name."""
        ...

    @property
    def tokenizer_json(self) -> bytes:
        """tokenizer.json of the tokenizers library."""
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
        """A tensor in its own dtype; with start/stop only those rows. CheckpointError where it cannot be
        read.
        """
        ...

    def read_into(self, name: str, start: int, out: Array) -> None:
        """Rows of a tensor from `start` into an array of its dtype, [rows, …] in C order."""
        ...

    def read_columns(self, name: str, start: int, stop: int) -> Array:
        """Columns [start, stop) of a matrix, in its own dtype, C order."""
        ...

    def sha256(self, stop: threading.Event | None = None) -> str:
        """SHA-256 of all that is built from. Setting `stop` ends it early; the result then means nothing."""
        ...

    def write_tokenizer(self, folder: Path) -> list[Path]:
        """Write the tokenizer's files into a folder, each chat template as a file of its own; what was
        written.
        """
        ...
