"""Opens a checkpoint, a local path or a hub id, with the container that its content calls for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nearfar.build.weights.checkpoint import open_directory
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.foreign import file_is
from nearfar.build.weights.gguf.container import claims_gguf, open_gguf
from nearfar.build.weights.hub import download
from nearfar.build.weights.mlc_directory import is_mlc, open_mlc
from nearfar.errors import CheckpointError


@dataclass(frozen=True)
class Container:
    """A kind of container: functions that recognize a path, and open it, given the model's name."""

    claims: Callable[[Path], bool]
    open: Callable[[Path, str], Checkpoint]


CONTAINERS: tuple[Container, ...] = (
    Container(claims_gguf, open_gguf),
    Container(is_mlc, open_mlc),
    Container(Path.is_dir, open_directory),
)
"""The containers in order; the first that claims a path opens it."""


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a local checkpoint, or download one from the hub (`owner/name`, `owner/name:Q4_K_M`) into its
    cache and open it.

    Raises CheckpointError for anything missing, damaged or in an unsupported format, before any tensor is
    read.
    """
    path = Path(source).expanduser()
    name = path.resolve().name if path.exists() else str(source)
    if not path.exists():
        path = download(str(source))
        name = path.name if path.is_file() else name
    for container in CONTAINERS:
        if container.claims(path):
            return container.open(path, name)
    what = file_is(path) or "a file, and no GGUF file"
    raise CheckpointError(
        f"{path} is {what}. A checkpoint is a GGUF file, or a directory with config.json and "
        "model.safetensors"
    )
