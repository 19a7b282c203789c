"""Products of test parameters that run in turns.

A test marked `@in_turns("target", "precision")` is parametrized by those names and by others (a case). In
each run every case runs with one of the combinations of target and precision; the next turn takes the next
one. Cases start at different combinations, so that each run covers all targets and precisions.

The content of the commit decides the turn: a rerun of a commit runs the same tests, the next commit runs
others. `NEARFAR_TURN=N` (a number that the run printed) repeats a turn; `NEARFAR_TURN=all` runs all turns.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

from tests.support.paths import ROOT

First = TypeVar("First")
Second = TypeVar("Second")
VARIABLE = "NEARFAR_TURN"
ALL = "all"
_MARK = "in_turns"
_TURNS = 5040
"""Turns are numbers below this one, which many numbers of combinations divide."""


def in_turns(*names: str) -> pytest.MarkDecorator:
    """Marks a test: for each combination of its other parameters, a run takes one combination of the
    parameters `names`.
    """
    return getattr(pytest.mark, _MARK)(*names)


def paired(firsts: Sequence[First], seconds: Sequence[Second]) -> list[tuple[First, Second]]:
    """Pair each of the firsts with one of the seconds in this turn; with each of them if all turns run.

    It is for the params of a fixture that is expensive to make (an artifact, an engine): with a mark, each
    test of the file could choose another one.
    """
    number = turn()
    if number is None:
        return [(first, second) for first in firsts for second in seconds]
    return [(first, seconds[(number + at) % len(seconds)]) for at, first in enumerate(firsts)]


def share(cases: Sequence[First], parts: int, kind: Callable[[First], str] | None = None) -> list[First]:
    """Every `parts`-th of the cases in this turn, and others in the next: `parts` turns in a row run all.
    All cases where all turns run. With `kind`, every `parts`-th of the cases of each kind.

    For cases that are dear before a test asks for them (jobs that a fixture compiles as one library), and
    for long lists of cases of which many are much alike.
    """
    number = turn()
    if number is None:
        return list(cases)
    kinds: dict[str, int] = {}
    seen: Counter[str] = Counter()
    chosen = []
    for at, case in enumerate(cases):
        if kind is None:
            place = at + at // parts  # cases come in twos and fours: or a size would always meet one target
        else:
            name = kind(case)
            place = kinds.setdefault(name, len(kinds)) + seen[name]
            seen[name] += 1
        if (number + place) % parts == 0:
            chosen.append(case)
    return chosen


def opposed(pair: tuple[Any, Any], *choices: tuple[Any, Any]) -> list[tuple[Any, ...]]:
    """Both of a pair: the first with one combination of the choices in this turn, the second with the
    combination that differs in all of them, so that each run has every choice. All combinations if all turns
    run. It is for what is expensive to make, like `paired`.
    """
    combinations = list(product(*choices))
    number = turn()
    chosen = range(len(combinations)) if number is None else [number % len(combinations)]
    both = [((pair[0], *combinations[at]), (pair[1], *combinations[-1 - at])) for at in chosen]
    return [each for found in both for each in found]


def turn() -> int | None:
    """The turn of this run; None if all turns run. Raises ValueError if the variable has any other value."""
    given = os.environ.get(VARIABLE)
    if given == ALL:
        return None
    if given:
        if not given.isdigit():
            raise ValueError(f"{VARIABLE}={given}: give a number that a run printed, or {ALL}")
        return int(given)
    return int(_content(), 16) % _TURNS


def told() -> str:
    """One line for the person who reads the run: the turn, and how to repeat it or to run all."""
    number = turn()
    if number is None:
        return "all turns"
    return f"turn {number} ({VARIABLE}={number} repeats it, {VARIABLE}={ALL} runs all turns)"


def _content() -> str:
    """The digest of the commit's content; outside a git checkout, of the paths and sizes of the tests."""
    told = subprocess.run(
        ["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if told.returncode == 0:
        return told.stdout.strip()
    files = sorted((ROOT / "tests").rglob("*.py"))
    return hashlib.sha256("\n".join(f"{p.name} {p.stat().st_size}" for p in files).encode()).hexdigest()


def select(items: Sequence[pytest.Item], number: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that run in this turn, and those that do not, each in their order."""
    groups: dict[tuple[str, str], dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker(_MARK) is not None:
            group, combination = _place(item)
            groups.setdefault(group, {}).setdefault(combination, []).append(item)
    left: set[int] = set()
    before: dict[str, int] = {}  # groups of each test function
    for (function, _), combinations in groups.items():
        at = before[function] = before.get(function, -1) + 1
        # Cases come in fours (group sizes): each four starts one further, or one size stays on one target.
        chosen = (number + zlib.crc32(function.encode()) + at + at // 4) % len(combinations)
        for index, members in enumerate(combinations.values()):
            if index != chosen:
                left |= {id(item) for item in members}
    return [i for i in items if id(i) not in left], [i for i in items if id(i) in left]


def _place(item: Any) -> tuple[tuple[str, str], str]:
    """The key that items share of which one runs in a turn, and the item's combination."""
    names = {name for mark in item.iter_markers(_MARK) for name in mark.args}
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    lacking = names - set(given)
    if lacking:
        raise pytest.UsageError(f"{item.nodeid} has no parameter {', '.join(sorted(lacking))}: see in_turns")
    rest = sorted((name, _told(value)) for name, value in given.items() if name not in names)
    of = sorted((name, _told(value)) for name, value in given.items() if name in names)
    return (item.nodeid.partition("[")[0], repr(rest)), repr(of)


def _told(value: Any) -> str:
    """A parameter as text that is the same in every process."""
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
