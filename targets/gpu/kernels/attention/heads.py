"""What the attention kernels for GPUs share: heads as vectors of four dimensions, where they are whole."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.kernels.jobs import Attend
from nearfar.targets.gpu.kernels.common import stored
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, joined


@dataclass(frozen=True)
class Head:
    """A head as `count` vectors of `width` dimensions: 4, or 1 where the head is no multiple of it."""

    width: int
    count: int

    @staticmethod
    def of(job: Attend) -> Head:
        """How a job's heads are read: in vectors, or number by number where vectors do not divide them."""
        width = 1 if job.head_dim % WIDTH else WIDTH
        return Head(width, job.head_dim // width)

    def dtype(self, scalar: str) -> str:
        """The dtype of a buffer of vectors."""
        return scalar if self.width == 1 else f"{scalar}x{self.width}"

    def f32(self, vector):
        """Cast to float32."""
        return T.Cast(self.dtype("float32"), vector)

    def scaled(self, vector, by: float):
        """Times a number."""
        factor = T.float32(by)
        return vector * (factor if self.width == 1 else T.Broadcast(factor, self.width))

    def part(self, vector, place: int):
        """One dimension."""
        return vector if self.width == 1 else at(vector, place)

    def stored(self, places, first, dtype: str):
        """What `put` wrote, or other float32 of a local array, as a vector of a buffer of this dtype."""
        made = [stored(places[first + place], dtype) for place in range(self.width)]
        return made[0] if self.width == 1 else joined(made)

    def dot(self, a, b):
        """Sum of the products."""
        total = self.part(a, 0) * self.part(b, 0)
        for place in range(1, self.width):
            total = total + self.part(a, place) * self.part(b, place)
        return total

    def put(self, places, first, vector) -> None:
        """Write a vector's dimensions to a local array from the first place on (statements)."""
        for place in range(self.width):
            T.buffer_store(places, self.part(vector, place), [first + place])

    def dot_of(self, total, places, first, vector):
        """Total and the products of a vector with what `put` wrote."""
        for place in range(self.width):
            total = total + places[first + place] * self.part(vector, place)
        return total

    def add(self, sums, first, vector, weight) -> None:
        """Add vector · weight to `width` sums from the first on (statements of the kernel being parsed)."""
        for place in range(self.width):
            T.buffer_store(sums, sums[first + place] + self.part(vector, place) * weight, [first + place])


def begin(job: Attend, length):
    """The first position that a row sees, whose `length` is its position and 1 (0: padding)."""
    return T.int32(0) if job.window is None else T.max(length - job.window, 0)


def seen(job: Attend) -> int:
    """Positions that a row may see at most."""
    context = job.pages_per_slot * job.page_size
    return context if job.window is None else min(context, job.window)


def heads_together(job: Attend, most: int) -> list[int]:
    """Numbers of query heads that a workgroup may take of those that share a kv head, the most first."""
    shared = job.heads // job.kv_heads
    return [size for size in range(min(most, shared), 0, -1) if shared % size == 0]
