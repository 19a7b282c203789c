"""Decides which tests share a worker of pytest-xdist (`--dist loadgroup`), and which start first.

Tests of a file share its module fixtures, so a file is a group. Tests over the engines of
tests/device/conftest.py are grouped by backend over all files: one worker builds an engine and compiles its
shaders. A test with the mark `xdist_group` keeps its own group. The most expensive groups start first
(tests/budgets.json), so that no worker has a long one left at the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.support import budgets
from tests.support.paths import ROOT


def group_of(item: Any) -> str:
    """The group of a test: its mark, its backend, or its file."""
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0] if mark.args else mark.kwargs["name"])
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if "backend" in given and "lab" in item.fixturenames:
        return f"backend {given['backend']}"
    return file_of(item)


def file_of(item: pytest.Item) -> str:
    """The path of a test's file from the repository's root."""
    return item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else str(item.path)


def arrange(items: list[pytest.Item]) -> None:
    """Mark every test with its group, and put the most expensive groups first, each in its own order."""
    known, counts = budgets.load(), Counter(map(file_of, items))
    groups = [group_of(item) for item in items]
    cost: defaultdict[str, float] = defaultdict(float)
    for item, group in zip(items, groups, strict=True):
        file = file_of(item)
        cost[group] += known.get(file, budgets.LEAST) / counts[file]
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    order = sorted(range(len(items)), key=lambda at: (-cost[groups[at]], groups[at], at))
    items[:] = [items[at] for at in order]
