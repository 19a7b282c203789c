"""Targets as the pipeline sees them: each checks, writes weights, compiles, and completes artifacts."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nearfar import targets

if TYPE_CHECKING:
    from nearfar.build.targets.target import Target

_OF_LIBRARIES = ("mlx", "onnx")
"""Targets whose programs come from a library: modules of this folder. All others have a target.py in
targets/.
"""


@cache
def target_names() -> tuple[str, ...]:
    """The names of all targets, sorted."""
    files = (file for folder in targets.__path__ for file in Path(folder).glob("*/target.py"))
    planned = (file.parent.name for file in files)
    return tuple(sorted((*planned, *_OF_LIBRARIES)))


@cache
def target_of(name: str) -> Target:
    """The target of this name, imported at the first call; KeyError for an unknown name."""
    if name not in target_names():
        raise KeyError(name)
    if name in _OF_LIBRARIES:
        return cast("Target", import_module(f"{__name__}.{name}").TARGET)
    from nearfar.build.targets.planned import PlannedTarget

    return PlannedTarget(**vars(import_module(f"{targets.__name__}.{name}.target").TARGET))
