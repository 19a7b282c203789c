"""Sorts pairs of a row and one of its experts by expert, into tiles of a few pairs of one expert each.

The kernels read each weight once for a tile. How many tiles there are depends on what the rows choose, so as
many are launched as there can be, and those that are left over have no expert.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.kernels.jobs import Experts
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.script.text import prim_func

MOST_ROWS = 8
"""The most pairs of a tile: a thread has two sums for each in registers."""
MOST_THREADS = 256


@dataclass(frozen=True)
class Tiles:
    """The tiles of a job. `rows`: the pairs of a tile; 1: each pair is a tile, in the order of the rows."""

    job: Experts
    rows: int

    @classmethod
    def of(cls, job: Experts) -> Tiles:
        """Tiles about as high as an expert has rows if all experts are chosen equally often."""
        expected = max(1, job.m * job.top // job.experts)
        return cls(job, max(n for n in (1, 2, 4, MOST_ROWS) if n <= expected))

    @property
    def pairs(self) -> int:
        """Rows times experts of a row."""
        return self.job.m * self.job.top

    @property
    def count(self) -> int:
        """The most tiles: every chosen expert may have one that is not full."""
        return (self.pairs + min(self.job.experts, self.pairs) * (self.rows - 1)) // self.rows

    @property
    def buffer(self) -> tuple[tuple[int, int], str]:
        """What the kernels read about tiles: the output of Route; or, where tiles have several pairs, the
        expert of each tile, then its pairs, −1 for none.
        """
        if self.rows == 1:
            return (self.job.m, 2 * self.job.top), "float32"
        return (self.count, 1 + self.rows), "int32"

    def expert(self, chosen, tile):
        """The expert of a tile, −1 for none."""
        if self.rows == 1:
            return T.Cast("int32", chosen[tile // self.job.top, tile % self.job.top])
        return chosen[tile, 0]

    def pair(self, chosen, tile, i):
        """Pair `i` of a tile, −1 for none."""
        return tile if self.rows == 1 else chosen[tile, 1 + i]


def tiled(tiles: Tiles):
    """The kernel that sorts the pairs: one workgroup, whose threads have an expert each."""
    job, rows, pairs, most = tiles.job, tiles.rows, tiles.pairs, tiles.count
    m, top, experts = job.m, job.top, job.experts
    threads = min(MOST_THREADS, ceil_div(experts, 32) * 32)
    rounds = ceil_div(experts, threads)
    shape, dtype = tiles.buffer

    def chooses(route, p, e):
        return T.Cast("int32", route[p // top, p % top]) == e

    @prim_func
    def kernel(route: T.Buffer((m, 2 * top), "float32"), out: T.Buffer(shape, dtype)):
        for bx in T.thread_binding(1, thread="blockIdx.x"):  # noqa: B007
            for tx in T.thread_binding(threads, thread="threadIdx.x"):
                counts = T.alloc_shared((experts,), "int32")
                at = T.alloc_local((2,), "int32")  # pairs counted; slot, or tile
                for i in T.serial(rounds):
                    if i * threads + tx < experts:
                        at[0] = 0
                        for p in T.serial(pairs):
                            if chooses(route, p, i * threads + tx):
                                at[0] = at[0] + 1
                        counts[i * threads + tx] = at[0]
                T.tvm_storage_sync("shared")
                for i in T.serial(rounds):
                    if i * threads + tx < experts:
                        at[1] = 0
                        for e in T.serial(experts):
                            if e < i * threads + tx:
                                at[1] = at[1] + (counts[e] + rows - 1) // rows * rows
                        for p in T.serial(pairs):
                            if chooses(route, p, i * threads + tx):
                                out[at[1] // rows, 0] = i * threads + tx
                                out[at[1] // rows, 1 + at[1] % rows] = p
                                at[1] = at[1] + 1
                        for r in T.serial(rows):  # noqa: B007
                            if at[1] % rows > 0:
                                out[at[1] // rows, 1 + at[1] % rows] = -1
                                at[1] = at[1] + 1
                at[1] = 0
                for e in T.serial(experts):
                    at[1] = at[1] + (counts[e] + rows - 1) // rows
                for t in T.serial(ceil_div(most, threads)):
                    if t * threads + tx >= at[1] and t * threads + tx < most:
                        out[t * threads + tx, 0] = -1

    return select(kernel, ["route", "out"], "experts_tiles")
