"""Helpers for the records of all jobs: their outputs and their names."""

from __future__ import annotations

from collections.abc import Mapping

Output = tuple[tuple[int, ...], str]
"""The shape and dtype of an output."""


def short(dtype: str) -> str:
    """A dtype as kernels' names spell it: f32, f16."""
    return dtype.replace("float", "f")


def labelled(name: str, flags: Mapping[str, bool]) -> str:
    """A kernel's name, followed by the flags that are set."""
    return "_".join([name, *(flag for flag, on in flags.items() if on)])
