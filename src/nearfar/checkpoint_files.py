"""Finds a checkpoint's weight files and adapters by file names alone: before a download, and when it is
opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from nearfar import strict_json
from nearfar.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""The file that peft writes beside the weights of an adapter."""


def weight_files(names: Collection[str], indexed: Collection[str]) -> list[str]:
    """The names of the files that hold a checkpoint's weights, sorted. `names`: its files; `indexed`: the
    files that its index names, there or not.

    An index none of whose files exists is ignored next to a model.safetensors: it was uploaded with another
    version of the weights. Other files, and files in folders, are copies of the same weights, as Mistral
    publishes them, or belong to something else.
    """
    if indexed and (SINGLE not in names or any(name in names for name in indexed)):
        return sorted(indexed)
    if SINGLE in names:
        return [SINGLE]
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)


def indexed_files(index: bytes) -> set[str]:
    """The files that an index names; empty for an unreadable index, which is reported when the checkpoint is
    opened.
    """
    try:
        read = strict_json.loads(index)
    except ValueError:
        return set()
    found = read.get("weight_map") if isinstance(read, Mapping) else None
    return {str(name) for name in found.values()} if isinstance(found, Mapping) else set()


def check_no_adapter(folder: Path, name: str) -> None:
    """Raise CheckpointError, with `name`, where a folder has an adapter: it changes its model's answers, also
    those of a model in the same folder.
    """
    if not (folder / ADAPTER).is_file():
        return
    what = adapter_is(folder / ADAPTER)
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"{name} holds a model and {what}. To take the model without the adapter, remove {ADAPTER}"
        )
    raise CheckpointError(f"{name} has {what}")


def adapter_is(file: Path) -> str:
    """The model that an adapter belongs to, by its config, and what to do with it."""
    base: object = None
    try:
        read = strict_json.loads(file.read_text(encoding="utf-8"))
        base = read.get("base_model_name_or_path") if isinstance(read, dict) else None
    except (OSError, ValueError):
        pass
    of = f" of {base[:100]}" if isinstance(base, str) else ""
    return (
        f"a LoRA adapter{of}: nearfar build MODEL --adapter FOLDER merges it into its model, where FOLDER "
        "has the adapter's files alone"
    )
