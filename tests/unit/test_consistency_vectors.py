"""Inconsistent manifests are rejected as tests/vectors/format/consistency.json says;
web/test/consistency.test.ts tests TypeScript, which rejects `cases`, but not those of `python`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from nearfar.errors import ArtifactError
from nearfar.format.manifest_file import parse
from tests.support.paths import ROOT

VECTORS = json.loads((ROOT / "tests/vectors/format/consistency.json").read_text(encoding="utf-8"))


def test_the_manifest_that_the_cases_change_adds_up() -> None:
    parse(VECTORS["manifest"], "manifest.json")


@pytest.mark.parametrize("case", VECTORS["cases"] + VECTORS["python"], ids=lambda case: case["name"])
def test_a_case_is_refused_with_the_names(case: dict[str, Any]) -> None:
    made = copy.deepcopy(VECTORS["manifest"])
    place = made
    for key in case["at"][:-1]:
        place = place[key]
    place[case["at"][-1]] = case["value"]
    with pytest.raises(ArtifactError) as refused:
        parse(made, "manifest.json")
    assert all(name in str(refused.value) for name in case["names"])
