"""The buffers of a kernel, and the results of a walk over a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from .reads import Reads


@dataclass(frozen=True)
class VectorType:
    """Dtype and lanes of a value."""

    name: str
    bits: int
    lanes: int

    @staticmethod
    def of(expr: Any) -> VectorType:
        """The kind of an expression."""
        dtype = expr.ty.dtype
        text = str(dtype)
        return VectorType(text.rstrip("0123456789x"), int(dtype.bits), int(dtype.lanes))

    @property
    def size(self) -> int:
        """The size of a value in bytes."""
        return self.bits * self.lanes // 8

    @property
    def cost(self) -> float:
        """The cost of an operation on such values: GPUs compute two float16 of a vector at once."""
        return self.lanes / 2 if self.bits == 16 and self.lanes > 1 else float(self.lanes)


@dataclass(frozen=True)
class TracedBuffer:
    """A buffer: a parameter, or an array of the kernel."""

    name: str
    scope: str
    kind: VectorType
    shape: tuple[int, ...]
    """The extents; 0 if the runtime chooses one."""

    @property
    def elements(self) -> int:
        """The number of elements; 0 if the runtime chooses the shape."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """The size in bytes; 0 if the runtime chooses the shape."""
        return self.elements * self.kind.size


@dataclass
class Trace:
    """The counts of a launch."""

    grid: tuple[int, int, int] = (1, 1, 1)
    workgroup: tuple[int, int, int] = (1, 1, 1)
    parameters: dict[str, TracedBuffer] = field(default_factory=dict)
    reads: dict[str, Reads] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    """Bytes stored to each parameter."""
    shared_bytes: int = 0
    operations: float = 0.0
    barriers: float = 0.0
    in_flight: float = 0.0
    """Bytes of streamed buffers that all threads load in the stretch with the most."""
    loads_ahead: float = 0.0
    """Loads of streamed buffers in that stretch, by the thread with the most."""
    steps: float = 0.0
    """Stretches with loads of streamed buffers that a thread runs one after another."""
    loaded_by_one: float = 0.0
    """Bytes of the streamed buffers that the busiest thread loads."""


def kind_of(buffer: Any) -> VectorType:
    """The kind of a buffer's elements."""
    text = str(buffer.dtype)
    base, _, lanes = text.partition("x")
    name = base.rstrip("0123456789")
    return VectorType(name, int(base[len(name) :] or 8), int(lanes or 1))


def shape_of(buffer: Any) -> tuple[int, ...]:
    """A buffer's shape, with 0 where the runtime chooses an extent."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm | int) else 0 for extent in buffer.shape)


def parameter_of(parameter: Any) -> TracedBuffer:
    """A kernel's parameter as memory."""
    return TracedBuffer(str(parameter.name), "global", kind_of(parameter.ty), shape_of(parameter.ty))
