"""Finds LoRA adapters, in folders and on the hub, and the models that they belong to, before any weight is
read or downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar import strict_json
from nearfar.checkpoint_files import ADAPTER
from nearfar.errors import CheckpointError
from nearfar.hub import HUB_ID, names_of, no_path, snapshot, text_of

WEIGHTS = "adapter_model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class Pair:
    """The checkpoint of a build, and the adapter that is merged into it (None: no adapter is merged)."""

    checkpoint: str
    adapter: str | None = None


def pair_of(checkpoint: str, adapter: str | None) -> Pair:
    """What a build reads: the checkpoint and the adapter that are given, or the adapter alone, with the model
    that it names. Raises CheckpointError where `adapter` is not an adapter, where an adapter names no model,
    and where two adapters are given.
    """
    alone = adapter_at(checkpoint)
    if alone is not None and adapter is not None:
        raise CheckpointError(
            f"{checkpoint} is an adapter itself: give the model it adapts, and --adapter {adapter}"
        )
    if adapter is not None:
        if (told := no_path(adapter)) is not None:
            raise CheckpointError(told)
        if adapter_at(adapter, beside_model=True) is None:
            raise CheckpointError(
                f"{adapter} has no {ADAPTER}: --adapter takes what peft saves, a LoRA adapter"
            )
        return Pair(checkpoint, adapter)
    if alone is None:
        return Pair(checkpoint)
    base = alone.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{checkpoint}: {ADAPTER} names no model (base_model_name_or_path): give it, as nearfar build "
            f"MODEL --adapter {checkpoint}"
        )
    return Pair(base, checkpoint)


def adapter_at(source: str, beside_model: bool = False) -> Mapping[str, Any] | None:
    """The adapter_config.json of a folder or a repository of the hub with an adapter and no model; None for
    others. `beside_model`: the folder may hold a model, too.
    """
    path, named = Path(source).expanduser(), HUB_ID.fullmatch(source)
    if path.exists():
        if not (path / ADAPTER).is_file() or (not beside_model and (path / CONFIG).is_file()):
            return None
        return _read(path / ADAPTER)
    if named is None or named["wanted"] is not None:
        return None
    if not beside_model and text_of(source, CONFIG) is not None:  # asked first, as for every repository
        return None
    try:
        names = names_of(source)
    except ModuleNotFoundError:  # a missing client is reported where it is needed
        return None
    if ADAPTER not in names:
        return None
    return _read(snapshot(source, (ADAPTER,)) / ADAPTER)


def short_name(adapter: str) -> str:
    """The last part of an adapter's path or hub id."""
    path = Path(adapter).expanduser()
    return path.resolve().name if path.exists() else adapter.rpartition("/")[2]


def folder_of(adapter: str) -> Path:
    """The folder of an adapter, with its weights; downloaded for a hub id."""
    path = Path(adapter).expanduser()
    return path if path.exists() else snapshot(adapter, (ADAPTER, WEIGHTS))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        read = strict_json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}): download or copy it again") from error
    if not isinstance(read, dict):
        raise CheckpointError(f"{file}: holds no JSON object: copy it again")
    return read
