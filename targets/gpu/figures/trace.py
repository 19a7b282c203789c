"""What a walk over a kernel knows of its buffers, and what it finds out of a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from .reads import Reads


@dataclass(frozen=True)
class Kind:
    """Dtype and lanes of a value."""

    name: str
    bits: int
    lanes: int

    @staticmethod
    def of(expr: Any) -> Kind:
        """The kind of an expression."""
        dtype = expr.ty.dtype
        text = str(dtype)
        return Kind(text.rstrip("0123456789x"), int(dtype.bits), int(dtype.lanes))

    @property
    def size(self) -> int:
        """Bytes."""
        return self.bits * self.lanes // 8

    @property
    def cost(self) -> float:
        """Operations of one on such values: GPUs compute two float16 of a vector at once."""
        return self.lanes / 2 if self.bits == 16 and self.lanes > 1 else float(self.lanes)


@dataclass(frozen=True)
class Memory:
    """A buffer: a parameter's, or one of the kernel's own."""

    name: str
    scope: str
    kind: Kind
    shape: tuple[int, ...]
    """0: the runtime chooses."""

    @property
    def elements(self) -> int:
        """0 where the runtime chooses the shape."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes; 0 where the runtime chooses the shape."""
        return self.elements * self.kind.size


@dataclass
class Trace:
    """What a launch does."""

    grid: tuple[int, int, int] = (1, 1, 1)
    workgroup: tuple[int, int, int] = (1, 1, 1)
    parameters: dict[str, Memory] = field(default_factory=dict)
    reads: dict[str, Reads] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    """Bytes stored to each parameter."""
    shared_bytes: int = 0
    operations: float = 0.0
    barriers: float = 0.0
    in_flight: float = 0.0
    """Bytes of the streamed buffers, of all threads, in the stretch that has the most."""
    loads_ahead: float = 0.0
    """Loads of the streamed buffers in that stretch, of the thread that has the most."""
    steps: float = 0.0
    """Stretches with loads of the streamed buffers, one after another in a thread."""
    loaded_by_one: float = 0.0
    """Bytes of the streamed buffers that the busiest thread loads."""


def kind_of(buffer: Any) -> Kind:
    """The kind of a buffer's elements."""
    text = str(buffer.dtype)
    base, _, lanes = text.partition("x")
    name = base.rstrip("0123456789")
    return Kind(name, int(base[len(name) :] or 8), int(lanes or 1))


def shape_of(buffer: Any) -> tuple[int, ...]:
    """A buffer's shape, with 0 where the runtime chooses an extent."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm | int) else 0 for extent in buffer.shape)


def parameter_of(parameter: Any) -> Memory:
    """What a kernel is given."""
    return Memory(str(parameter.name), "global", kind_of(parameter.ty), shape_of(parameter.ty))
