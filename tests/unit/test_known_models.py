"""The short names: each has a model that a build reads, the size of its shape, and a line in the docs."""

from __future__ import annotations

import re

import pytest

from nearfar.build.synth import published
from nearfar.store.known import KNOWN
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_are_those_of_the_shapes(name: str) -> None:
    known = KNOWN[name]
    shape = published(known.shape)
    assert shape.model.removesuffix("-Instruct") == known.source.removesuffix("-Instruct")
    assert known.millions == round(sum(tensor.size for tensor in shape.tensors.values()) / 1e6)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/store.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([^`]+)` \| (\S+/\S+) \| ([\d,]+) \| ([^|]+) \|$", page, re.MULTILINE)
    expected = {
        (name, known.source, f"{known.millions:,}", known.quant or "as published")
        for name, known in KNOWN.items()
    }
    assert set(told) == expected
    assert len(told) == len(KNOWN)
