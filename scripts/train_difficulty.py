"""Trains the difficulty model of the router: RouteLLM's correctness tables (Apache-2.0) in,
routing/difficulty/model.json out.

    python scripts/train_difficulty.py [--data DIR] [--lexicon FILE] [--seed N] [--output FILE] [--check]

Needs nearfar and NumPy. One data set and one seed give one file. `--check` writes nothing and fails if the
file that is there differs from what training gives by more than rounding. How good the model is:
benchmarks/routing/apgr.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from nearfar.errors import NearfarError
from nearfar.routing.difficulty.score import MODEL
from nearfar.routing.difficulty.training import dump, read_routellm, train

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data" / "eval" / "routellm"


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal, with numbers compared to four digits."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-8)
    return bool(a == b)


def main() -> None:
    """Train, and write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with gsm8k/ and mmlu/")
    parser.add_argument("--lexicon", type=Path, default=Path(__file__).with_name("difficulty_lexicon.json"))
    parser.add_argument("--seed", type=int, default=0, help="of the folds that set the calibration")
    parser.add_argument("--output", type=Path, default=MODEL)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        examples = read_routellm(options.data)
        model = train(examples, json.loads(options.lexicon.read_text(encoding="utf-8")), seed=options.seed)
    except NearfarError as error:
        sys.exit(f"error: {error}")
    if options.check:
        if not same(json.loads(options.output.read_text(encoding="utf-8")), json.loads(dump(model))):
            sys.exit(f"error: {options.output} is not what this data gives: run without --check")
        print(f"{options.output} is what {len(examples)} examples give")
        return
    options.output.write_text(dump(model), encoding="utf-8")
    print(f"wrote {options.output} from {len(examples)} examples, {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
