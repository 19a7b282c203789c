"""Runs a selection of tests, and reports the failed tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.patches import Selection

SECONDS = 900
"""Seconds after which a selection counts as hanging: a mutation that makes a test wait for ever is not caught
by that test.
"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)
_NOT_IMPORTED = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "IndentationError")


@dataclass(frozen=True)
class Outcome:
    """The tests that failed. `problem`: why the selection gives no result."""

    failed: tuple[str, ...] = ()
    problem: str | None = None


def run(selection: Selection, tree: Path, environment: Mapping[str, str]) -> Outcome:
    """Run the tests of a selection in a tree, up to the first failure."""
    command, folder = _vitest(selection, tree) if selection.is_web else _pytest(selection, tree)
    try:
        done = subprocess.run(
            command, cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return Outcome(problem=f"{selection} did not end within {SECONDS} seconds")
    told = (done.stdout + done.stderr)[-2000:]
    if selection.is_web:
        return _of_vitest(selection, tree / "web" / "vitest.json", told)
    return of_pytest(selection, done.returncode, done.stdout, told)


def _pytest(selection: Selection, tree: Path) -> tuple[list[str], Path]:
    options = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, selection.path, *selection.options], tree


def _vitest(selection: Selection, tree: Path) -> tuple[list[str], Path]:
    file = selection.path.removeprefix("web/")
    options = ["--bail=1", "--reporter=json", "--outputFile=vitest.json", "--testTimeout=30000"]
    return ["npx", "vitest", "run", *options, file, *selection.options], tree / "web"


def of_pytest(selection: Selection, code: int, printed: str, told: str) -> Outcome:
    """Interpret pytest's exit code: 0: all passed; 1: tests failed; any other code gives no result."""
    if code == 0 and " passed" not in printed and not re.search(r"^[sxX]*\.", printed, re.MULTILINE):
        return Outcome(problem=f"{selection} ran no test, all are skipped here: {told}")
    if code == 0:
        return Outcome()
    if code == 5:
        return Outcome(problem=f"{selection} selects no test: change the catch line")
    found = _FAILED.findall(printed)
    broken = [reason for _, reason in found if reason.startswith(_NOT_IMPORTED)]
    if code != 1 or not found or broken:
        reason = broken[0] if broken else told
        return Outcome(problem=f"{selection} did not run (pytest ended with {code}): {reason}")
    return Outcome(tuple(test for test, _ in found))


def _of_vitest(selection: Selection, report: Path, told: str) -> Outcome:
    """Interpret vitest's report: a file that cannot be loaded has no tests, and gives no result."""
    try:
        files = json.loads(report.read_text(encoding="utf-8"))["testResults"]
    except FileNotFoundError:
        return Outcome(problem=f"{selection} did not run: {told}")
    report.unlink()
    tests = [test for file in files for test in file["assertionResults"]]
    ran = [test for test in tests if test["status"] in ("passed", "failed")]
    if not ran:
        return Outcome(problem=f"{selection} ran no test: {told}")
    failed = [f"{selection.path} > {t['fullName'].strip()}" for t in ran if t["status"] == "failed"]
    return Outcome(tuple(failed))
