"""Reads the files about embeddings that sentence-transformers saves with a checkpoint: modules.json lists the
modules after the model, and 1_Pooling/config.json says which hidden states are pooled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from nearfar import strict_json
from nearfar.errors import CheckpointError

MODULES = "modules.json"
_MODE = "pooling_mode_"
_FOLLOWED: dict[str, Literal["mean", "last"]] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}


def modules_of(checkpoint: Path) -> list[tuple[str, Mapping[str, object]]] | None:
    """Each module's kind and record; None where the checkpoint has no modules.json."""
    file = checkpoint / MODULES
    if not file.is_file():
        return None
    modules = read(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{file}: expected a list of modules")
    return [(str(module.get("type")).rpartition(".")[2], module) for module in modules]


def modes_of(checkpoint: Path, module: Mapping[str, object]) -> list[str]:
    """The modes of a pooling module, in the older spelling (one switch for each) or the newer one."""
    file = checkpoint / str(module.get("path")) / "config.json"
    config = read(file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected an object")
    on = [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]
    named = config.get("pooling_mode")
    return on + [str(one) for one in (named if isinstance(named, list) else [] if named is None else [named])]


def pooling_of(checkpoint: Path) -> Literal["mean", "last"] | None:
    """The checkpoint's pooling: the mean of its states or the last one; None where it does not say. Raises
    CheckpointError for any other pooling.
    """
    for kind, module in modules_of(checkpoint) or ():
        if kind == "Pooling":
            on = modes_of(checkpoint, module)
            if len(on) == 1 and on[0] in _FOLLOWED:
                return _FOLLOWED[on[0]]
            raise CheckpointError(
                f"{checkpoint}: its embeddings are pooled by {', '.join(on) or 'nothing'}; only the mean "
                "and the last token can be followed"
            )
    return None


def read(file: Path) -> object:
    """Read a JSON file. Raises CheckpointError where it is invalid."""
    try:
        found: object = strict_json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}): download it again") from error
    return found
