"""Applies each mutation to a copy of the repository, and runs the tests that should catch it.

    python -m tests.mutations [--only NAME …] [--list] [--every] [--clean] [--turns all|N] [--markdown FILE]

Exit codes: 0: all mutations were caught; 1: some survived, and are named; 2: a patch no longer applies, or a
selection gives no result (it does not exist, does not import, or hangs), and the file to change is named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.patches import FOLDER, Mutation, PatchError, read_all
from tests.mutations.running import run
from tests.mutations.tree import Tree, environment
from tests.support import turns


@dataclass(frozen=True)
class Result:
    """The result of one mutation. `problem`: why there is no verdict."""

    mutation: Mutation
    failed: tuple[str, ...]
    problem: str | None
    seconds: float

    @property
    def told(self) -> str:
        """The result as a cell of the table."""
        if self.problem is not None:
            return "NOT KNOWN, see below"
        return self.failed[0] if self.failed else "no test fails"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        mutations = _wanted(read_all(), asked.only)
        if asked.list:
            for mutation in mutations:
                print(f"{mutation.name:40} {mutation.area:24} {mutation.breaks}")
            return 0
        if asked.turns is not None:
            os.environ[turns.VARIABLE] = asked.turns
        print(turns.told(), flush=True)
        results = _run_all(mutations, asked)
    except PatchError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.markdown is not None:
        asked.markdown.write_text(markdown(results), encoding="utf-8")
    return _verdict(results, asked.clean)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", default=[], help="these mutations, by (part of) name"
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--every",
        action="store_true",
        help="run all selections of a mutation, not up to the first that fails",
    )
    parser.add_argument(
        "--clean", action="store_true", help="without the mutations: all selections must pass"
    )
    parser.add_argument("--turns", metavar="all|N", help="the turn of products (tests/support/turns.py)")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table there, too")
    return parser


def _wanted(mutations: list[Mutation], names: Sequence[str]) -> list[Mutation]:
    if not names:
        return mutations
    exact = [m for m in mutations if m.name in names]
    found = exact or [m for m in mutations if any(name in m.name for name in names)]
    if not found:
        raise PatchError(f"no mutation in {FOLDER} has {' or '.join(names)} in its name: see --list")
    return found


def _run_all(mutations: Sequence[Mutation], asked: argparse.Namespace) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="nearfar-mutations-") as name, Tree.opened(Path(name)) as tree:
        for mutation in mutations:
            results.append(_run_one(mutation, Path(name), tree, asked))
            _print(results[-1])
    return results


def _run_one(mutation: Mutation, folder: Path, tree: Tree, asked: argparse.Namespace) -> Result:
    start = time.monotonic()
    own = folder / mutation.name
    own.mkdir()
    failed: list[str] = []
    problem = None
    try:
        with nullcontext() if asked.clean else tree.mutated(mutation):
            variables = environment(own, tree.root, asked.turns)
            for selection in mutation.catch:
                outcome = run(selection, tree.root, variables)
                failed += outcome.failed
                problem = problem or outcome.problem
                if (failed or problem) and not asked.every:
                    break
    except PatchError as error:  # the other patches are run all the same
        problem = str(error)
    shutil.rmtree(own)
    return Result(mutation, tuple(failed), problem, time.monotonic() - start)


def _print(result: Result) -> None:
    mutation = result.mutation
    print(f"{mutation.name:40} | {mutation.area:24} | {result.told} | {result.seconds:.0f} s", flush=True)
    for test in result.failed[1:]:
        print(f"{'':40} | {'':24} | {test} |", flush=True)


def markdown(results: Sequence[Result]) -> str:
    """The table; test functions are listed without their parameters."""
    rows = ["| mutation | what it breaks | caught by |", "|---|---|---|"]
    for result in results:
        tests = dict.fromkeys(re.sub(r"(\.py::\w+)\[.*", r"\1", test) for test in result.failed)
        caught = "; ".join(f"`{test}`" for test in tests) or result.told
        rows.append(f"| {result.mutation.name} | {result.mutation.breaks} | {caught} |")
    return "\n".join(rows) + "\n"


def _verdict(results: Sequence[Result], clean: bool) -> int:
    """Print the verdict over all results; gives the exit code."""
    problems = [result for result in results if result.problem is not None]
    said = [result for result in results if result.problem is None]
    wrong = [result for result in said if bool(result.failed) is clean]
    if clean:
        told = (
            "fail without a mutation"
            if wrong
            else f"all selections of {len(said)} mutations pass without them"
        )
    else:
        told = "survived" if wrong else f"{len(said)} of {len(results)} mutations are caught"
    print(told + "".join(f"\n  {result.mutation.name}: {result.mutation.breaks}" for result in wrong))
    for result in problems:
        print(f"{result.mutation.file}: {result.problem}", file=sys.stderr)
    return 2 if problems else 1 if wrong else 0


if __name__ == "__main__":
    # the worktree is removed all the same
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.exit(main())
