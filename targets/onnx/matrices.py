"""Matrices in ONNX Runtime's operators: MatMulNBits multiplies our integers, and plain operators look up
rows.

Our weights are w = scale·q + bias, ONNX Runtime's are scale·(q − zero), where `zero` defaults to half the
codes' range. So w = scale·(q − half) + d with d = bias + scale·half, and x·Wᵀ is MatMulNBits plus the sums of
each group of x times Dᵀ: a product with one value for each group instead of one for each weight. If bias is
−scale·z with an integer z everywhere, z is the zero point, and there is no second term. A zero point in
float, which the operator takes too, runs 20 to 50 times slower, and not at all at 8 bits:
docs/decisions/0022.

Codes of 8 bits are multiplied as two planes of 4: q = 16·high + low. The operator has no kernel for 8 bits in
float and widens the whole matrix at every product, which takes 50 times as long as both planes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nearfar.kernels.codes import pack_codes
from nearfar.kernels.quantized import Array, Matrix, QuantTensor
from nearfar.targets.onnx.configs import stored_bits
from nearfar.targets.onnx.external import ExternalWriter, Placed
from nearfar.targets.onnx.graph import MICROSOFT, Graph


def write_matrix(
    files: ExternalWriter, name: str, matrix: Matrix, tensor: QuantTensor | Array, int8: bool
) -> dict[str, Placed]:
    """Append a matrix's arrays to the files; returns their places, by the last part of their names. `int8`:
    as in MatrixNodes.

    Dense: `weight` [n, k], float16 or float32. Quantized: `codes` uint8 [n, k/group, group·bits/8], the first
    code in the lowest bits; `scales` float16 [n, k/group]; `zeros` uint8 [n, k/group·bits/8, rounded up] if
    offsets are integers, else `biases` float16 [n, k/group]. In planes: `codes.high` and `codes.low`, and
    `zeros.high` and `zeros.low`, as if each had 4 bits.
    """
    if not isinstance(tensor, QuantTensor):
        return {"weight": files.add(f"{name}.weight", tensor)}
    stored = tensor.widened(stored_bits(tensor.bits), matrix.group, matrix.k)
    blocks = matrix.k // matrix.group
    codes = stored.words.astype("<u4", copy=False).view(np.uint8).reshape(matrix.n, blocks, -1)
    arrays: dict[str, Array] = {"scales": stored.scales}
    zeros = integer_zeros(stored)
    if stored.bits == 8 and not int8:
        arrays |= {f"codes.{plane}": _pairs(part) for plane, part in _planes(codes)}
        if zeros is not None:
            arrays |= {f"zeros.{plane}": _packed_rows(part, 4) for plane, part in _planes(zeros)}
    else:
        arrays["codes"] = codes
        if zeros is not None:
            arrays["zeros"] = _packed_rows(zeros, stored.bits)
    if zeros is None:
        arrays["biases"] = stored.biases
    return {part: files.add(f"{name}.{part}", array) for part, array in arrays.items()}


def _planes(codes: npt.NDArray[np.uint8]) -> list[tuple[str, npt.NDArray[np.uint8]]]:
    """The planes of the four high and of the four low bits."""
    four, low = np.uint8(4), np.uint8(15)
    return [("high", np.right_shift(codes, four)), ("low", np.bitwise_and(codes, low))]


def _pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of 4 bits, two in a byte, the first in the lowest bits."""
    second: npt.NDArray[np.uint8] = np.left_shift(codes[..., 1::2], np.uint8(4))
    return np.bitwise_or(codes[..., ::2], second)


def integer_zeros(tensor: QuantTensor) -> npt.NDArray[np.uint8] | None:
    """Zero points uint8 [n, k/group]: z with bias = −scale·z exactly; None if a group has none."""
    scales, biases = tensor.scales.astype(np.float32), tensor.biases.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = np.where(biases == 0, np.float32(0), np.rint(-biases / scales))
    if not np.isfinite(zeros).all() or zeros.min() < 0 or zeros.max() >= 1 << tensor.bits:
        return None
    exact = -(scales * zeros) == biases
    return np.asarray(zeros, np.uint8) if exact.all() else None


def _packed_rows(zeros: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Zero points as the operators read them: packed by rows of whole bytes."""
    n, blocks = zeros.shape
    padded = np.zeros((n, -(-blocks // 32) * 32), np.uint8)
    padded[:, :blocks] = zeros
    words = pack_codes(padded, bits).astype("<u4", copy=False).view(np.uint8)
    return np.ascontiguousarray(words[:, : -(-blocks * bits // 8)])


@dataclass
class MatrixNodes:
    """Adds nodes for products with a model's matrices, and for lookups of their rows.

    `int8`: rows are rounded to int8 by groups for MatMulNBits (its accuracy_level 4), as in the cpu target's
    int8 products.
    """

    graph: Graph
    matrices: Mapping[str, Matrix]
    placed: Mapping[str, Mapping[str, Placed]]
    int8: bool
    _sums: dict[tuple[str, int], str] = field(default_factory=dict)

    def product(self, x: str, name: str, bias: str | None = None) -> str:
        """Add x·Wᵀ (+ bias): x [..., k] to [..., n]."""
        graph, matrix = self.graph, self.matrices[name]
        if matrix.quantized:
            out = self._quantized(x, name)
        else:
            weight = self._wide(name, "weight")
            out = graph.node("FusedMatMul", x, weight, domain=MICROSOFT, transB=1)
        return out if bias is None else graph.node("Add", out, bias)

    def rows(self, ids: str, name: str) -> str:
        """Look up rows of a matrix: ids [b, l] to float32 [b, l, k].

        GatherBlockQuantized would do it in one node, but builds of ONNX Runtime for browsers lack it.
        """
        graph, matrix = self.graph, self.matrices[name]
        if not matrix.quantized:
            found = graph.node("Gather", self._tensor(name, "weight"), ids, axis=0)
            return found if matrix.bits == 32 else graph.node("Cast", found, to=1)
        blocks = matrix.k // matrix.group
        codes = self._codes(name, "codes", ids, [0, 0, blocks, matrix.group])
        scales = self._by_group(self._gathered(name, "scales", ids))
        if "biases" in self.placed[name]:
            biases = self._by_group(self._gathered(name, "biases", ids))
            rows = graph.node("Add", graph.node("Mul", codes, scales), biases)
        else:
            padded = self._codes(name, "zeros", ids, [0, 0, -1])
            bounds = (graph.constant([value], "int64") for value in (0, blocks, -1))
            zeros = self._by_group(graph.node("Slice", padded, *bounds))
            rows = graph.node("Mul", graph.node("Sub", codes, zeros), scales)
        return graph.node("Reshape", rows, graph.constant([0, 0, matrix.k], "int64"))

    def _codes(self, name: str, part: str, ids: str, shape: list[int]) -> str:
        """Look up rows of packed codes, the first code in the lowest bits, as float32 with the
        given shape.
        """
        graph = self.graph
        if not self._in_planes(name):
            return self._unpacked(name, part, ids, shape, stored_bits(self.matrices[name].bits))
        high, low = (self._unpacked(name, f"{part}.{plane}", ids, shape, 4) for plane in ("high", "low"))
        return graph.node("Add", graph.node("Mul", high, graph.constant(16, "float32")), low)

    def _unpacked(self, name: str, part: str, ids: str, shape: list[int], bits: int) -> str:
        graph = self.graph
        packed = graph.node("Gather", self._tensor(name, part), ids, axis=0)
        if bits < 8:
            shifts, mask = np.arange(0, 8, bits), (1 << bits) - 1
            spread = graph.node("Unsqueeze", packed, graph.constant([-1], "int64"))
            shifted = graph.node("BitShift", spread, graph.constant(shifts, "uint8"), direction="RIGHT")
            apart = graph.node("BitwiseAnd", shifted, graph.constant(mask, "uint8"))
            packed = graph.node("Reshape", apart, graph.constant(shape, "int64"))
        return graph.node("Cast", packed, to=1)

    def _in_planes(self, name: str) -> bool:
        return "codes.high" in self.placed[name]

    def _gathered(self, name: str, part: str, ids: str) -> str:
        return self.graph.node("Gather", self._wide(name, part), ids, axis=0)

    def _by_group(self, values: str) -> str:
        """Reshape [..., k/group], one value for each group, to [..., k/group, 1]."""
        return self.graph.node("Unsqueeze", values, self.graph.constant([-1], "int64"))

    def _quantized(self, x: str, name: str) -> str:
        graph, matrix = self.graph, self.matrices[name]
        scales = self._wide(name, "scales")
        if self._in_planes(name):
            larger = graph.node("Mul", scales, graph.constant(16, "float32"))
            high = self._multiplied(x, name, larger, ".high", 4)
            out = graph.node("Add", high, self._multiplied(x, name, scales, ".low", 4))
        else:
            out = self._multiplied(x, name, scales, "", stored_bits(matrix.bits))
        if "biases" not in self.placed[name]:
            return out
        sums = self._group_sums(x, matrix)
        second = graph.node("FusedMatMul", sums, self._offsets(name), domain=MICROSOFT, transB=1)
        return graph.node("Add", out, second)

    def _multiplied(self, x: str, name: str, scales: str, plane: str, bits: int) -> str:
        matrix, zeros = self.matrices[name], f"zeros{plane}"
        level = {"accuracy_level": 4} if self.int8 else {}
        return self.graph.node(
            "MatMulNBits",
            *(x, self._tensor(name, f"codes{plane}"), scales),
            *([self._tensor(name, zeros)] if zeros in self.placed[name] else []),
            domain=MICROSOFT,
            K=matrix.k,
            N=matrix.n,
            bits=bits,
            block_size=matrix.group,
            **level,
        )

    def _group_sums(self, x: str, matrix: Matrix) -> str:
        """Sums of x by group, [..., k/group]; matrices with the same input share them."""
        key = (x, matrix.group)
        if key not in self._sums:
            graph = self.graph
            shape = graph.constant([0, 0, matrix.k // matrix.group, matrix.group], "int64")
            apart = graph.node("Reshape", x, shape)
            self._sums[key] = graph.node("ReduceSum", apart, graph.constant([-1], "int64"), keepdims=0)
        return self._sums[key]

    def _offsets(self, name: str) -> str:
        """The value d of the module's docstring, float32 [n, k/group]; the runtime folds it into one
        constant.
        """
        # With two planes each has a half: 16·8 + 8.
        graph, bits = self.graph, stored_bits(self.matrices[name].bits)
        half = 136 if self._in_planes(name) else 1 << (bits - 1)
        shifted = graph.node("Mul", self._wide(name, "scales"), graph.constant(half, "float32"))
        return graph.node("Add", self._wide(name, "biases"), shifted)

    def _tensor(self, name: str, part: str) -> str:
        return self.graph.external(f"{name}.{part}", self.placed[name][part])

    def _wide(self, name: str, part: str) -> str:
        """A floating-point tensor in float32: files store float16, which the runtime widens once."""
        value = self._tensor(name, part)
        return value if self.placed[name][part].dtype == "float32" else self.graph.node("Cast", value, to=1)
