"""Which files of a checkpoint hold its weights, by names alone, and whether there is an adapter among them:
before a download, and when it is opened.
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

    An index of which no file is there says nothing beside a model.safetensors: it was uploaded with another
    version of the weights. Files in folders and beside these two are the same weights once more, as Mistral
    publishes them, or parts of something else.
    """
    if indexed and (SINGLE not in names or any(name in names for name in indexed)):
        return sorted(indexed)
    if SINGLE in names:
        return [SINGLE]
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)


def indexed_files(index: bytes) -> set[str]:
    """The files that an index names; none where it cannot be read, which is told by who opens it."""
    try:
        read = strict_json.loads(index)
    except ValueError:
        return set()
    found = read.get("weight_map") if isinstance(read, Mapping) else None
    return {str(name) for name in found.values()} if isinstance(found, Mapping) else set()


def check_no_adapter(folder: Path, name: str) -> None:
    """CheckpointError, with the name, where a folder has an adapter, which changes the answers of the model
    that it is of, also of one beside it.
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
    """What an adapter is of, by its config, and what to do with it."""
    base: object = None
    try:
        read = strict_json.loads(file.read_text(encoding="utf-8"))
        base = read.get("base_model_name_or_path") if isinstance(read, dict) else None
    except (OSError, ValueError):
        pass
    of = f" of {base[:100]}" if isinstance(base, str) else ""
    return (
        f"a LoRA adapter{of}: put it into its model with peft, merge_and_unload(), and save that with "
        "save_pretrained"
    )
