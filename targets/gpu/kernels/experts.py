"""The gated MLPs of the experts that the rows have chosen, in two launches: the hidden values of each pair of
a row and one of its experts, then the weighted sums.

Matrices are stored with the outputs of all experts side by side (packing.py), so an expert is a range of
columns. A thread has one column, whose words its neighbours' loads join; a workgroup has one pair, or one
row. With many rows each row reads its experts itself.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Experts
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu.kernels.activations import activated, sigmoid_product
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.linear.layout import (
    Units,
    dense_element,
    place_factor,
    placed_code,
    scale_and_bias,
    scale_shape,
    top_code_offset,
    word_shape,
)
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.packing import parts

THREADS = 32


@dataclass(frozen=True)
class Column:
    """How a thread reads a column: `groups` of `steps` units each; of dense matrices one group."""

    matrix: Matrix
    units: Units

    @classmethod
    def of(cls, matrix: Matrix) -> Column:
        """The column of a matrix."""
        return cls(matrix, Units.of(matrix))

    @property
    def groups(self) -> int:
        """Groups that share a scale and a bias."""
        return self.matrix.k // self.matrix.group if self.matrix.quantized else 1

    @property
    def steps(self) -> int:
        """Units of a group."""
        return self.units.count // self.groups

    @property
    def ragged(self) -> bool:
        """Whether the last unit has values beyond the inputs."""
        return self.matrix.k % self.units.inputs != 0

    @property
    def shapes(self):
        """Shapes and dtype of the codes or values, and of the scales."""
        return (*word_shape(self.matrix), scale_shape(self.matrix))

    def value(self, word, e):
        """Code or value `e` of a unit."""
        if not self.matrix.quantized:
            return dense_element(word[0], self.matrix.bits, e)
        if not self.units.placed:
            return self.units.code(word, 0, e)
        code = placed_code(word[0], self.matrix.bits, e) * place_factor(self.matrix.bits, e)
        lost = T.float32(top_code_offset(self.matrix.bits))
        return code + T.Select(e == self.units.inputs - 1, lost, T.float32(0))

    def scaled(self, w1, group, column, products, inputs):
        """The sum of a group, from its sum of codes times inputs and its sum of inputs."""
        scale, bias = scale_and_bias(self.matrix, w1, group, column)
        return scale * products + bias * inputs

    def input(self, x, row, at):
        """Input `at` of a row, zero beyond the last."""
        if not self.ragged:
            return x[row, at]
        return T.Select(at < self.matrix.k, x[row, T.min(at, self.matrix.k - 1)], T.float32(0))

    def add(self, acc, which, part, word, at, x, row, w0, w1) -> None:
        """Add the product of a row of x and the column at[2] to acc[which] (statements).

        Registers: `part` has a group's sum of products, its sum of inputs, and an input; `word` a unit's
        words; at[3] the unit.
        """
        units, column = self.units, at[2]
        with T.serial(self.groups) as g:
            for i in range(2):
                T.buffer_store(part, T.float32(0), [i])
            with T.serial(self.steps) as j:
                T.buffer_store(at, g * self.steps + j, [3])
                with T.unroll(units.words) as v:
                    T.buffer_store(word, units.load(w0, at[3], v, column), [v])
                with T.unroll(units.inputs) as e:
                    T.buffer_store(part, self.input(x, row, at[3] * units.inputs + e), [2])
                    T.buffer_store(part, part[0] + self.value(word, e) * part[2], [0])
                    T.buffer_store(part, part[1] + part[2], [1])
            if self.matrix.quantized:
                T.buffer_store(part, self.scaled(w1, g, column, part[0], part[1]), [0])
            T.buffer_store(acc, acc[which] + part[0], [which])


def experts(job: Experts) -> Staged:
    """The launches of an Experts job."""
    first, last = len(parts(job.gate_up)), len(parts(job.down))
    words = [f"w{i}" for i in range(first + last)]
    hidden = ((job.m * job.top, job.inner), "float32")
    scratch = f"{SCRATCH}0"
    stages = (
        Stage(_hidden(job, words[:first]),
              ("x", "route", *words[:first], *["gate_up_bias"] * job.gate_up_bias, scratch)),
        Stage(_sums(job, words[first:]),
              (scratch, "route", *words[first:], *["down_bias"] * job.down_bias, "out")),
    )  # fmt: skip
    return Staged(stages, (hidden,))


def _hidden(job: Experts, words):
    """Hidden value `column` of a pair."""
    m, top, k, inner, halves = job.m, job.top, job.k, job.inner, 1 + job.gated
    column = Column.of(job.gate_up)
    units = column.units
    codes_shape, dtype, scales_shape = column.shapes
    names = ["x", "route", *["w0", "w1"][: len(words)], *["bias"] * job.gate_up_bias, "out"]

    def hidden(gate, up):
        if not job.gated:
            return activated(job.activation, gate)
        if job.clamp is None:
            return activated(job.activation, gate) * up
        return sigmoid_product(gate, T.float32(job.clamp[0]) * gate) * (up + T.float32(1))

    def bounded(value, low):
        if job.clamp is None:
            return value
        value = T.min(value, T.float32(job.clamp[1]))
        return T.max(value, T.float32(-job.clamp[1])) if low else value

    @prim_func
    def kernel(
        x: T.Buffer((m, k), "float32"),
        route: T.Buffer((m, 2 * top), "float32"),
        w0: T.Buffer(codes_shape, dtype),
        w1: T.Buffer(scales_shape, "uint32"),
        bias: T.Buffer((job.gate_up.n,), "float32"),
        out: T.Buffer((m * top, inner), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(inner, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(m * top, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((4,), "int32")  # column, expert, column of gate or up, unit
                    word = T.alloc_local((units.words,), dtype)
                    acc = T.alloc_local((2,), "float32")
                    part = T.alloc_local((3,), "float32")  # sum of products, of inputs, an input
                    at[0] = bx * THREADS + tx
                    if at[0] < inner:
                        at[1] = T.Cast("int32", route[by // top, by % top])
                        if at[1] < 0:
                            out[by, at[0]] = T.float32(0)
                        else:
                            for half in T.serial(halves):
                                acc[half] = T.float32(0)
                                at[2] = (at[1] * halves + half) * inner + at[0]
                                column.add(acc, half, part, word, at, x, by // top, w0, w1)
                                if job.gate_up_bias:
                                    acc[half] = acc[half] + bias[at[2]]
                            acc[0] = bounded(acc[0], False)
                            acc[1] = bounded(acc[1], True)
                            out[by, at[0]] = hidden(acc[0], acc[1])

    return select(kernel, names, "experts_hidden")


def _sums(job: Experts, words):
    """Column `column` of a row: the sum over its experts, in their order."""
    m, top, inner, n = job.m, job.top, job.inner, job.n
    column = Column.of(job.down)
    units = column.units
    codes_shape, dtype, scales_shape = column.shapes
    names = ["x", "route", *["w0", "w1"][: len(words)], *["bias"] * job.down_bias, "out"]

    @prim_func
    def kernel(
        x: T.Buffer((m * top, inner), "float32"),
        route: T.Buffer((m, 2 * top), "float32"),
        w0: T.Buffer(codes_shape, dtype),
        w1: T.Buffer(scales_shape, "uint32"),
        bias: T.Buffer((job.down.n,), "float32"),
        out: T.Buffer((m, n), "float32"),
    ):
        for bx in T.thread_binding(ceil_div(n, THREADS), thread="blockIdx.x"):
            for by in T.thread_binding(m, thread="blockIdx.y"):
                for tx in T.thread_binding(THREADS, thread="threadIdx.x"):
                    at = T.alloc_local((4,), "int32")  # column, expert, its column, unit
                    word = T.alloc_local((units.words,), dtype)
                    acc = T.alloc_local((2,), "float32")  # sum over experts, over inputs
                    part = T.alloc_local((3,), "float32")  # sum of products, of inputs, an input
                    at[0] = bx * THREADS + tx
                    if at[0] < n:
                        acc[0] = T.float32(0)
                        for i in T.serial(top):
                            at[1] = T.Cast("int32", route[by, i])
                            if at[1] >= 0:
                                acc[1] = T.float32(0)
                                at[2] = at[1] * n + at[0]
                                column.add(acc, 1, part, word, at, x, by * top + i, w0, w1)
                                if job.down_bias:
                                    acc[1] = acc[1] + bias[at[2]]
                                acc[0] = acc[0] + acc[1] * route[by, i + top]
                        out[by, at[0]] = acc[0]

    return select(kernel, names, "experts_sums")
