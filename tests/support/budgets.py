"""Each test file has a budget in CPU seconds (tests/budgets.json), so that the suite stays as short as it
is.

`python -m tests.support.budgets FILE…` reads what test runs wrote (tests/support/times.py) and names the
files that took more than their budget; it ends with exit status 1 if a file took three times its budget
and the time lost is large enough to be felt (`FELT`).
`--write` makes the budgets again from these runs: do this after a run with empty caches, and read the
difference.

A slow machine must not fail: budgets are scaled by a loop that is timed here and was timed when they were
written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.times import Spent, Times

PATH = Path(__file__).parents[1] / "budgets.json"
REFERENCE = 0.10
"""CPU seconds of `calibration` on the machine on which the budgets were written (Zen 4, 2.6 GHz)."""
FAILS = 3.0
"""A run fails where a file takes this many times its budget."""
FELT = 30
"""CPU seconds above its budget from which on a file fails a run: a browser that starts for the first time,
or a shader that another test did not compile this time, costs a small file several times its budget."""
LEAST = 4
"""CPU seconds: no budget is smaller, since imports that files share count for the first of them."""
ROOM = 1.5
"""`--write` multiplies measured seconds by this: turns differ, and who compiles a shared engine."""


def calibration(rounds: int = 5) -> float:
    """CPU seconds of a fixed loop: the median of some rounds."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        table: dict[int, int] = {}
        for i in range(1_000_000):
            table[i & 1023] = table.get(i & 1023, 0) + i
        taken.append(time.process_time() - start)
    return sorted(taken)[rounds // 2]


def spent_by_file(runs: Iterable[Times]) -> dict[str, float]:
    """CPU seconds of each test file over several runs (side by side, alone, vitest, the browser)."""
    found: dict[str, Spent] = {}
    for run in runs:
        for name, spent in run.files.items():
            found.setdefault(name, Spent()).add(spent)
    return {name: spent.cpu for name, spent in found.items()}


def over(spent: Mapping[str, float], budgets: Mapping[str, float], scale: float) -> dict[str, float]:
    """How many times its budget each file took that took more than once; a file without one has LEAST."""
    times = {name: cpu / (budgets.get(name, LEAST) * scale) for name, cpu in spent.items()}
    return {name: ratio for name, ratio in sorted(times.items(), key=lambda item: -item[1]) if ratio > 1}


def failing(spent: Mapping[str, float], budgets: Mapping[str, float], scale: float) -> list[str]:
    """The files that fail the run: FAILS times their budget or more, by FELT seconds or more."""
    return [
        name
        for name, ratio in over(spent, budgets, scale).items()
        if ratio >= FAILS and spent[name] - budgets.get(name, LEAST) * scale >= FELT * scale
    ]


def load(path: Path = PATH) -> dict[str, float]:
    """The budgets by file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Check or write; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.budgets", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="what a test run wrote")
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name} from these runs")
    given = parser.parse_args(arguments)
    spent = spent_by_file(map(Times.load, given.runs))
    if given.write:
        made = {name: max(LEAST, math.ceil(cpu * ROOM)) for name, cpu in sorted(spent.items())}
        dear = {name: value for name, value in made.items() if value > LEAST}
        PATH.write_text(json.dumps(dear, indent=1) + "\n")
        return 0
    budgets, scale = load(), max(1.0, calibration() / REFERENCE)
    found = over(spent, budgets, scale)
    for name, ratio in found.items():
        print(
            f"{name}: {spent[name]:.0f} CPU seconds, {ratio:.1f} times its budget of "
            f"{budgets.get(name, LEAST):.0f} (this machine counts {scale:.1f} times)"
        )
    bad = failing(spent, budgets, scale)
    if bad:
        print(
            f"error: {', '.join(bad)} took {FAILS:.0f} times the budget or more: make the tests cheaper, "
            f"or raise the numbers in tests/{PATH.name} and pay elsewhere if what they find is worth it",
            file=sys.stderr,
        )
    elif not found:
        print(f"all {len(spent)} test files are within their budgets")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
