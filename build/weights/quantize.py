"""Affine quantization, w ≈ scale * q + bias by groups of inputs, in the ways of format/scales.py.

Method. For each group we look for the codes, scale and bias that minimise the squared error, by alternating
least squares from several starting ranges: round the weights to the grid; then, the codes held fixed, take
the scale and bias that solve the two normal equations; repeat. This is the Lloyd-Max iteration (S. Lloyd,
*Least squares quantization in PCM*, 1982) on a uniform grid, as in the `make_qkx` search of llama.cpp's
k-quants; the shrunk starting ranges are the clipping search of AWQ (Lin et al., 2023). Scale and bias are
rounded to float16 before the codes are computed, so that the error that is minimised is the error that a
device sees.

Speed comes from `quantize_kernel`, where one pass over a group is one fused vector loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nearfar.build.weights.levels import two_levels
from nearfar.build.weights.slab import LANES, LARGEST, PARAMS, WORD, aligned_empty
from nearfar.errors import BuildError, CheckpointError
from nearfar.format.scales import CODE_BITS, GROUP_SIZES, PAIRS, VALUE_BITS, Scales
from nearfar.kernels.codes import holds
from nearfar.kernels.quantized import Array, QuantTensor, values_of

F32 = npt.NDArray[np.float32]

# Rows are searched in slices of about this many weights: 2 MiB as bfloat16, which stays in a core's cache.
SLICE_WEIGHTS = 1 << 20

__all__ = [
    "LARGEST",
    "METHOD",
    "Scheme",
    "Slice",
    "dequantize",
    "quantize",
    "quantize_slice",
    "slices",
    "stack",
    "to_float32",
]

# as a share of the group's mean: inputs that a calibration text never moved still count
LEAST_IMPORTANCE = 1e-3
METHOD = "alternating least squares from clipped ranges, float16 scale and bias inside the search"


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme: `bits` out of CODE_BITS with `group_size` out of GROUP_SIZES, or bits 0 for no
    quantization. `scales`: how the scales of the groups are stored.
    """

    bits: int
    group_size: int = 64
    scales: Scales = PAIRS

    @staticmethod
    def parse(text: str, group_size: int = 64) -> Scheme:
        """Parse the command line's `--quant q4 --group-size 64`. Raises BuildError for unknown values."""
        names = {**{f"q{bits}": bits for bits in CODE_BITS}, "none": 0}
        if text not in names:
            raise BuildError(f"unknown quantization {text!r}: use {', '.join(names)}")
        if group_size not in GROUP_SIZES:
            raise BuildError(f"unknown group size {group_size}: use {', '.join(map(str, GROUP_SIZES))}")
        return Scheme(names[text], group_size)

    @property
    def name(self) -> str:
        """The name in the command line and the manifest, such as q4, or none."""
        return f"q{self.bits}" if self.bits else "none"

    @property
    def label(self) -> str:
        """The scheme in words for messages, such as q4 in groups of 64."""
        return f"{self.name} in groups of {self.group_size}" if self.bits else self.name

    @property
    def linear(self) -> Scheme:
        """The scheme that holds the same weights without a table: its codes are the table's values."""
        return Scheme(VALUE_BITS, self.group_size, self.scales.linear) if self.scales.table else self

    def fits(self, k: int) -> bool:
        """Whether a matrix with k inputs can be quantized: its rows are whole groups, and their codes fill
        whole words.
        """
        return self.bits > 0 and k % self.group_size == 0 and self.scales.fits(k) and holds(k, self.bits)


@dataclass(frozen=True)
class Slice:
    """Rows of a matrix in the kernel's input buffer: `rows` [n, k] float32 or bfloat16, to be filled, is a
    view of `groups`.

    `groups` [blocks, LANES, group] float32 or uint16 is padded with groups of zeros at its end.
    """

    rows: Array
    groups: Array

    @staticmethod
    def empty(n: int, k: int, group: int, dtype: np.dtype[np.generic]) -> Slice:
        """Allocate a slice of n rows: bfloat16 for weights of that `dtype`, float32 for all others."""
        brain = dtype == ml_dtypes.bfloat16
        count = n * (k // group)
        blocks = -(-count // LANES)
        groups: Array = aligned_empty((blocks, LANES, group), np.uint16 if brain else np.float32)
        flat = groups.reshape(-1, group)
        flat[count:] = 0
        rows = flat[:count].reshape(n, k)
        return Slice(rows.view(ml_dtypes.bfloat16) if brain else rows, groups)


def slices(n: int, k: int) -> list[tuple[int, int]]:
    """Row ranges [start, stop) of about SLICE_WEIGHTS weights that cover a matrix [n, k]."""
    rows = max(1, SLICE_WEIGHTS // k)
    return [(start, min(n, start + rows)) for start in range(0, n, rows)]


def quantize(
    weight: Array, scheme: Scheme, name: str = "weight", importance: F32 | None = None
) -> QuantTensor:
    """Quantize a matrix.

    weight: [n, k] float32, float16 or bfloat16, finite; importance [k]: the weight of each input's squared
    error, None for equal weights. Gives words uint32 [n, k*bits/32], scales and biases float16 [n, k/group].
    Raises CheckpointError where a weight is NaN/Inf or beyond float16, BuildError where k is not a multiple
    of the group.
    """
    n, k = weight.shape
    if not scheme.fits(k):
        raise BuildError(
            f"{name} has {k} inputs, no multiple of the group size {scheme.group_size}: keep it dense"
        )
    parts = []
    for start, stop in slices(n, k):
        piece = Slice.empty(stop - start, k, scheme.group_size, weight.dtype)
        piece.rows[...] = weight[start:stop]
        parts.append(quantize_slice(piece, scheme, name, start, importance))
    return stack(parts)


def stack(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Concatenate the slices of a quantized matrix."""
    words, scales, biases = (
        np.concatenate([getattr(part, field) for part in parts]) for field in ("words", "scales", "biases")
    )
    units = [part.units for part in parts if part.units is not None]
    return QuantTensor(words, scales, biases, parts[0].bits, np.concatenate(units) if units else None)


def quantize_slice(
    piece: Slice, scheme: Scheme, name: str, first_row: int, importance: F32 | None = None
) -> QuantTensor:
    """Quantize a slice of the matrix `name` that begins at `first_row`, on the calling thread; errors as
    `quantize`.
    """
    if scheme.scales.superblock:
        start = quantize_slice(piece, replace(scheme, scales=PAIRS), name, first_row, importance)
        even = None if importance is None else _floored(importance)
        return two_levels(to_float32(piece.rows), start, scheme.scales, even)
    from nearfar.build.weights.quantize_kernel import (
        compiled_search,
    )  # late, because the module imports TVM, which opening and checking a checkpoint does not need

    blocks, lanes, group = piece.groups.shape
    n, k = piece.rows.shape
    words = aligned_empty((blocks, lanes, group * scheme.bits // WORD), np.uint16)
    params = aligned_empty((blocks, len(PARAMS), lanes), np.float32)
    source = "float32" if piece.groups.dtype == np.float32 else "bfloat16"
    weighted = importance is not None
    by_group = None if importance is None else _by_group(importance, group)
    centred = not scheme.scales.offsets
    compiled_search(scheme.bits, group, source, weighted, centred)(piece.groups, words, params, by_group)
    count = n * (k // group)
    scale, bias, low, high, total = params.transpose(1, 0, 2).reshape(len(PARAMS), -1)[:, :count]
    _check_range(piece.rows, (low, high, total), group, name, first_row)
    return QuantTensor(
        words.reshape(-1)[: n * k * scheme.bits // WORD].view("<u4").reshape(n, -1),
        scale.astype(np.float16).reshape(n, -1),
        bias.astype(np.float16).reshape(n, -1),
        scheme.bits,
    )


def _floored(importance: F32) -> F32:
    """Importance [k] of mean 1, never 0."""
    wide = importance / max(float(importance.mean(dtype=np.float64)), float(np.finfo(np.float32).tiny))
    return np.asarray(wide + LEAST_IMPORTANCE, np.float32)


def _by_group(importance: F32, group: int) -> F32:
    """Convert importance [k] to the kernel's form: [k/group, group], of mean 1 in a group, never 0."""
    wide = importance.reshape(-1, group).astype(np.float64)
    wide = wide / np.maximum(wide.mean(1, keepdims=True), np.finfo(np.float32).tiny) + LEAST_IMPORTANCE
    out: F32 = aligned_empty(wide.shape, np.float32)
    out[...] = wide / wide.mean(1, keepdims=True)
    return out


def dequantize(tensor: QuantTensor, group: int, scales: Scales = PAIRS) -> F32:
    """Dequantize a matrix to float32 [n, k]: scale * q + bias. `scales`: how they are stored."""
    codes = tensor.codes
    n, k = codes.shape
    weight = values_of(codes, scales).reshape(n, k // group, group).astype(np.float32)
    scale, bias = scales_and_biases(tensor, scales)
    weight *= scale[..., None]
    weight += bias[..., None]
    return weight.reshape(n, k)


def scales_and_biases(tensor: QuantTensor, scales: Scales) -> tuple[F32, F32]:
    """The scale and the bias of each group, float32 [n, groups], whichever way they are stored."""
    if tensor.units is None:
        return tensor.scales.astype(np.float32), tensor.biases.astype(np.float32)
    units = np.repeat(tensor.units, tensor.scales.shape[1] // tensor.units.shape[1], axis=1)
    unit, least = units.astype(np.float32).transpose(2, 0, 1)
    if scales.offsets:
        return unit * tensor.scales, -least * tensor.biases
    scale = unit * (tensor.scales.astype(np.float32) - scales.centre)
    return scale, scale * np.float32(-scales.zero(tensor.bits))


def to_float32(array: Array) -> F32:
    """Convert a floating array to a new float32 array in C order."""
    out = np.empty(array.shape, np.float32)
    _copy_float32(array, out)
    return out


def _copy_float32(array: Array, out: F32) -> None:
    """Copy a floating array into `out`; bfloat16 is converted by its bits, much faster than a cast."""
    if array.dtype == ml_dtypes.bfloat16:
        np.left_shift(array.view(np.uint16), np.uint32(16), out=out.view(np.uint32))
    else:
        out[...] = array


def _check_range(
    rows: Array, statistics: tuple[F32, F32, F32], group: int, name: str, first_row: int
) -> None:
    """Raise CheckpointError for NaN, Inf and groups whose scale or bias float16 cannot hold; statistics are
    each group's low, high and sum.
    """
    limit = LARGEST
    low, high, total = statistics
    with np.errstate(over="ignore", invalid="ignore"):  # the sum has a NaN even if the minimum has none
        good = np.isfinite(total) & (low >= -limit) & (high <= limit) & (high - low <= limit)
    if good.all():
        return
    bad = int(np.argmin(good))
    row, column = divmod(bad * group, rows.shape[1])
    where = f"{name}: the group at row {first_row + row}, columns {column} to {column + group - 1}"
    values = to_float32(rows[row, column : column + group])
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{where}, holds NaN or Inf: the checkpoint is damaged, download or export it again"
        )
    raise CheckpointError(
        f"{where}, spans {values.min():g} to {values.max():g}, beyond float16 (65504), in which scales and "
        "biases are stored: rescale the model's weights or build with --quant none"
    )
