"""The short names: each stands for a model that a build reads, with the size of its shape."""

from __future__ import annotations

import pytest

from nearfar.build.synth import published
from nearfar.store.known import KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_are_those_of_the_shapes(name: str) -> None:
    known = KNOWN[name]
    shape = published(known.shape)
    assert shape.model.removesuffix("-Instruct") == known.source.removesuffix("-Instruct")
    assert known.millions == round(sum(tensor.size for tensor in shape.tensors.values()) / 1e6)
