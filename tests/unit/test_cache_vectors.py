"""The Python bookkeeping passes the vectors that the TypeScript twin passes too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cache_vectors import VECTORS, apply, state, table


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_vector(path: Path) -> None:
    vector = json.loads(path.read_text())
    cache = table(vector["config"])
    for number, step in enumerate(vector["steps"]):
        where = f"step {number}: {step['op']} {step['args']}"
        assert apply(cache, step["op"], step["args"]) == step["result"], where
        assert state(cache) == step["state"], where
