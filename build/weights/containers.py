"""Opening a checkpoint: a local path, or a hub id; what kind of container it is, is told by what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nearfar.build.weights.checkpoint import CONFIG_FILES, INDEX, TOKENIZER_FILES, open_directory
from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.gguf.container import claims_gguf, open_gguf
from nearfar.build.weights.mlc_directory import MLC_FILES, is_mlc, open_mlc
from nearfar.errors import CheckpointError

HUB_PATTERNS = [
    "*.safetensors",
    INDEX,
    *CONFIG_FILES,
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "modules.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
    "LICENSE*",
    *MLC_FILES,
]


@dataclass(frozen=True)
class Container:
    """A kind of container: whether a path is one, and how it is opened, given a name for the model."""

    claims: Callable[[Path], bool]
    open: Callable[[Path, str], Checkpoint]


CONTAINERS: tuple[Container, ...] = (
    Container(claims_gguf, open_gguf),
    Container(is_mlc, open_mlc),
    Container(Path.is_dir, open_directory),
)
"""The first that claims a path opens it."""


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a local checkpoint, or a hub id (`owner/name`), which is downloaded into the hub's cache.

    Raises CheckpointError for anything missing, damaged or in a format that is not read, before any tensor is
    read.
    """
    path = Path(source).expanduser()
    name = path.resolve().name if path.exists() else str(source)
    if not path.exists():
        path = _download(str(source))
    for container in CONTAINERS:
        if container.claims(path):
            return container.open(path, name)
    raise CheckpointError(
        f"{path} is a file, and no GGUF file: name one, or the directory that holds config.json and "
        "model.safetensors"
    )


def _download(source: str) -> Path:
    """Snapshot of a hub repository in the hub's cache."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        raise CheckpointError(
            f"{source}: no such directory, and not a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct: "
            "check the path"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{source}: no such directory, and the download from the hub failed ({reason}): check the name, "
            "the network, and `hf auth login` for gated models"
        ) from error
