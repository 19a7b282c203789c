"""Fills in results and states of the vectors: python -m tests.vectors.cache.record [name …].

Read the diff before committing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.cache_vectors import VECTORS, apply, state, table


def dump(vector: dict[str, Any]) -> str:
    """Format a vector with one line for each part of a step, so that a diff shows the changes."""
    head = {key: vector[key] for key in ("name", "description", "config")}
    lines = [f'  "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
    steps = []
    for step in vector["steps"]:
        parts = ",\n     ".join(
            f'"{key}": {json.dumps(step[key])}' for key in ("op", "args", "result", "state")
        )
        steps.append(f"    {{{parts}}}")
    return "\n".join(["{", *lines, '  "steps": [', ",\n".join(steps), "  ]", "}", ""])


def record(path: Path) -> None:
    """Replay one file and write it again."""
    vector = json.loads(path.read_text())
    cache = table(vector["config"])
    for step in vector["steps"]:
        step.setdefault("args", {})
        step["result"] = apply(cache, step["op"], step["args"])
        step["state"] = state(cache)
    path.write_text(dump(vector))


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for file in sorted(VECTORS.glob("*.json")):
        if not wanted or file.stem in wanted:
            record(file)
