"""What the records of all jobs share: their outputs and their names."""

from __future__ import annotations

from collections.abc import Mapping

Output = tuple[tuple[int, ...], str]
"""Shape and dtype."""


def short(dtype: str) -> str:
    """As names of kernels have it: f32, f16."""
    return dtype.replace("float", "f")


def labelled(name: str, flags: Mapping[str, bool]) -> str:
    """A kernel's name with the flags that are set."""
    return "_".join([name, *(flag for flag, on in flags.items() if on)])
