"""Four neighbours as one vector, 16 bytes of float32 a load: buffers are declared so."""

# mypy: ignore-errors
# TVMScript: what is built here are expressions of the kernel that is being parsed.
from __future__ import annotations

from tvm.script import tirx as T

WIDTH = 4


def at(vector, place: int):
    """One of the four."""
    return T.Shuffle([vector], [place])
