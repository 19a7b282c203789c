"""A table's values in workgroup memory, where kernels that use a code once or twice look it up.

A lookup takes two operations and a load, which other units of a GPU do; to compute a value takes eight
operations. For that a workgroup waits at one barrier more.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.format.scales import TABLES
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.common import ceil_div, f32
from nearfar.targets.gpu.kernels.script.text import shared_array
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, joined
from nearfar.targets.gpu.kernels.tables import byte_of, value_of

BYTES = 4
"""Bytes of a value in memory."""


class Lookup:
    """The values of a matrix's table; of a matrix without a table nothing is declared or filled.

    `dtype`: float32, or uint32 for the bits of int8.
    """

    def __init__(self, matrix: Matrix, dtype: str = "float32") -> None:
        self.table, self.dtype = matrix.scales.table, dtype
        self.count = len(TABLES[self.table]) if self.table else 0

    @property
    def bytes(self) -> int:
        """Bytes of workgroup memory."""
        return self.count * BYTES

    def declare(self) -> None:
        """Declare the memory."""
        if self.table:
            self.values = shared_array("values", self.count, self.dtype)

    def fill(self, thread, threads: int) -> None:
        """Write the values, each by a thread of the workgroup's `threads`; ends with a barrier."""
        if not self.table:
            return
        made = value_of if self.dtype == "float32" else byte_of
        for turn in range(ceil_div(self.count, threads)):
            code = thread + turn * threads
            with T.If(code < self.count), T.Then():
                T.buffer_store(self.values, made(self.table, f32(code)), [code])
        T.evaluate(T.tvm_storage_sync("shared"))

    def of(self, codes):
        """The values of four codes, uint32x4."""
        codes = T.Bind(codes)
        return joined([self.values[T.Cast("int32", at(codes, place))] for place in range(WIDTH)])
