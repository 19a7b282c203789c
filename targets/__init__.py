"""Targets: what artifacts are built for. One folder each, whose target.py has `TARGET`; nothing else names
them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from nearfar.targets.target import Target


@cache
def target_names() -> tuple[str, ...]:
    """The targets that there are folders for."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/target.py")))


def target_of(name: str) -> Target:
    """The target of a folder, imported when it is asked for; KeyError where there is none."""
    if name not in target_names():
        raise KeyError(name)
    return cast("Target", import_module(f"{__name__}.{name}.target").TARGET)
