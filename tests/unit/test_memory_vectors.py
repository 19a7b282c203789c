"""Pages of the cache for a budget, as tests/vectors/memory says; web/test/memory-vectors.test.ts tests
TypeScript.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nearfar.edge_runtime.artifact import budget
from nearfar.edge_runtime.artifact.budget import kv_bytes, longest, plan_pages
from nearfar.errors import DeviceError
from nearfar.format.manifest_file import parse
from nearfar.memory import HostMemory
from tests.support.paths import ROOT

VECTORS = json.loads((ROOT / "tests/vectors/memory/plans.json").read_text(encoding="utf-8"))
MANIFESTS = {name: parse(data, name) for name, data in VECTORS["manifests"].items()}
PLENTY = 1 << 60


@pytest.mark.parametrize("case", VECTORS["cases"], ids=str)
def test_a_budget_gives_the_pages(case: dict[str, Any]) -> None:
    manifest = MANIFESTS[case["manifest"]]
    program = next(program for program in manifest.programs if program.name == case["program"])
    asked = (manifest, program, case["kv_memory"], case["largest_buffer"], None, PLENTY)
    if case["pages"] is None:
        with pytest.raises(DeviceError, match="is too little"):
            plan_pages(*asked)
        return
    pages = plan_pages(*asked)
    assert (list(pages), longest(manifest, pages)) == (case["pages"], case["context"])


def test_weights_that_are_larger_than_memory_leave_room_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the memory is for the cache, whatever the weights take."""
    manifest = next(iter(MANIFESTS.values()))
    free = 1 << 30
    monkeypatch.setattr(budget, "host_memory", lambda: HostMemory(2 * free, free))
    larger = replace(manifest, weights=replace(manifest.weights, bytes=4 * free))
    given = plan_pages(larger, manifest.programs[0], free // 8)
    assert plan_pages(larger, manifest.programs[0], None) == given
    assert min(given) >= 1


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_memory_that_is_named_for_a_length_gives_that_length(name: str) -> None:
    """`inspect` names it; a prompt is computed in steps, which need more of a window than single tokens."""
    manifest = MANIFESTS[name]
    for program in manifest.programs:
        for tokens in {min(n, manifest.model.context_length) for n in (1024, 2048, 1 << 20)}:
            named = kv_bytes(manifest, program, tokens)
            assert longest(manifest, plan_pages(manifest, program, named, memory=PLENTY)) >= tokens
