"""Helpers of the GPUs' attention kernels: heads as vectors of four dimensions, if the head length
allows it.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.kernels.jobs import Attend
from nearfar.targets.gpu.kernels.common import stored
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, joined


@dataclass(frozen=True)
class HeadVectors:
    """A head as `count` vectors of `width` dimensions: 4, or 1 if the head length is not a multiple of 4."""

    width: int
    count: int

    @staticmethod
    def of(job: Attend) -> HeadVectors:
        """How a job's heads are read: in vectors, or number by number if vectors do not divide them."""
        width = 1 if job.head_dim % WIDTH else WIDTH
        return HeadVectors(width, job.head_dim // width)

    def dtype(self, scalar: str) -> str:
        """The dtype of a buffer of vectors."""
        return scalar if self.width == 1 else f"{scalar}x{self.width}"

    def f32(self, vector):
        """Cast to float32."""
        return T.Cast(self.dtype("float32"), vector)

    def scaled(self, vector, by: float):
        """A vector times a number."""
        factor = T.float32(by)
        return vector * (factor if self.width == 1 else T.Broadcast(factor, self.width))

    def part(self, vector, place: int):
        """One dimension of a vector."""
        return vector if self.width == 1 else at(vector, place)

    def stored(self, places, first, dtype: str):
        """Float32 values of a local array (as `put` writes them) as a vector of a buffer with dtype
        `dtype`.
        """
        made = [stored(places[first + place], dtype) for place in range(self.width)]
        return made[0] if self.width == 1 else joined(made)

    def dot(self, a, b):
        """The dot product of two vectors."""
        total = self.part(a, 0) * self.part(b, 0)
        for place in range(1, self.width):
            total = total + self.part(a, place) * self.part(b, place)
        return total

    def put(self, places, first, vector) -> None:
        """Write a vector's dimensions to a local array from the first place on (statements)."""
        for place in range(self.width):
            T.buffer_store(places, self.part(vector, place), [first + place])

    def dot_of(self, total, places, first, vector):
        """`total` plus the products of a vector with values that `put` wrote."""
        for place in range(self.width):
            total = total + places[first + place] * self.part(vector, place)
        return total

    def add(self, sums, first, vector, weight) -> None:
        """Add vector · weight to `width` sums from the first on (statements of the kernel being parsed)."""
        for place in range(self.width):
            T.buffer_store(sums, sums[first + place] + self.part(vector, place) * weight, [first + place])


def begin(job: Attend, length):
    """The first position that a row sees; `length`: the row's position plus 1 (0: padding)."""
    return T.int32(0) if job.window is None else T.max(length - job.window, 0)


def seen(job: Attend) -> int:
    """The most positions that a row may see."""
    context = job.pages_per_slot * job.page_size
    return context if job.window is None else min(context, job.window)


def heads_together(job: Attend, most: int) -> list[int]:
    """The possible numbers of query heads in a workgroup, all with the same kv head, the largest first."""
    shared = job.heads // job.kv_heads
    return [size for size in range(min(most, shared), 0, -1) if shared % size == 0]
