"""Affine quantization in MLX's layout: w ≈ scale * q + bias, per group of consecutive inputs.

Method. For each group we look for the codes, scale and bias that minimise the squared error, by alternating least
squares from several starting ranges: round the weights to the grid; then, the codes held fixed, take the scale and
bias that solve the two normal equations; repeat. This is the Lloyd-Max iteration (S. Lloyd, *Least squares
quantization in PCM*, 1982) on a uniform grid, as in the `make_qkx` search of llama.cpp's k-quants; the shrunk starting
ranges are the clipping search of AWQ (Lin et al., 2023). Scale and bias are rounded to float16 before the codes are
computed, so that the error that is minimised is the error that a device sees.

Speed comes from `quantize_kernel`, where one pass over a group is one fused vector loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nearfar.build import quantize_kernel as kernel
from nearfar.build.quantize_kernel import LARGEST
from nearfar.errors import BuildError, CheckpointError
from nearfar.targets.base import Array, QuantTensor

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SLICE_WEIGHTS = 8 << 20  # searched at a time: 32 MiB as float32

__all__ = ["LARGEST", "METHOD", "Scheme", "dequantize", "quantize", "quantize_rows", "to_float32", "to_mlx"]

METHOD = "alternating least squares from clipped ranges, float16 scale and bias inside the search"


@dataclass(frozen=True)
class Scheme:
    """How matrices are stored: `bits` 4 or 8 with `group_size` 32 or 64, or bits 0 for no quantization."""

    bits: int
    group_size: int = 64

    @staticmethod
    def parse(text: str, group_size: int = 64) -> Scheme:
        """Scheme of the command line's `--quant q4|q8|none --group-size 32|64`; BuildError for anything else."""
        bits = {"q4": 4, "q8": 8, "none": 0}.get(text)
        if bits is None:
            raise BuildError(f"unknown quantization {text!r}: use q4, q8 or none")
        if group_size not in (32, 64):
            raise BuildError(f"unknown group size {group_size}: use 32 or 64")
        return Scheme(bits, group_size)

    @property
    def name(self) -> str:
        """The name of the command line and the manifest: q4, q8 or none."""
        return f"q{self.bits}" if self.bits else "none"

    def fits(self, k: int) -> bool:
        """Whether a matrix with k inputs can be quantized: k is a multiple of the group."""
        return self.bits > 0 and k % self.group_size == 0


def quantize(weight: Array, scheme: Scheme, name: str = "weight") -> QuantTensor:
    """Quantize a matrix.

    weight: [n, k] float32, float16 or bfloat16, finite.
    Gives codes uint8 [n, k], scales and biases float16 [n, k/group].
    Raises CheckpointError where a weight is NaN/Inf or beyond float16, BuildError where k is no multiple of the group.
    """
    return quantize_rows(lambda start, stop: weight[start:stop], (weight.shape[0], weight.shape[1]), scheme, name)


def quantize_rows(
    read: Callable[[int, int], Array], shape: tuple[int, int], scheme: Scheme, name: str = "weight"
) -> QuantTensor:
    """Quantize a matrix [n, k] that is read in slices: `read(start, stop)` gives rows [stop - start, k].

    Memory is that of the result and of one slice (SLICE_BYTES), not of the matrix.
    """
    n, k = shape
    if not scheme.fits(k):
        raise BuildError(f"{name} has {k} inputs, no multiple of the group size {scheme.group_size}: keep it dense")
    group = scheme.group_size
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, k // group), np.float16)
    biases = np.empty((n, k // group), np.float16)
    rows = min(n, max(1, SLICE_WEIGHTS // k))
    blocks = -(-rows * (k // group) // kernel.LANES)
    w: F32 = kernel.aligned_empty((blocks, kernel.LANES, group), np.float32)
    q: U8 = kernel.aligned_empty(w.shape, np.uint8)
    params: F32 = kernel.aligned_empty((blocks, 2, kernel.LANES), np.float32)
    search = kernel.compiled_search(scheme.bits, group)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        groups = (stop - start) * (k // group)
        blocks = -(-groups // kernel.LANES)
        flat = w.reshape(-1, group)
        _copy_float32(read(start, stop).reshape(-1, group), flat[:groups])
        flat[groups:] = 0  # lanes to spare
        _check_range(flat[:groups], name, start, k)
        search(w[:blocks], q[:blocks], params[:blocks])
        codes[start:stop] = q.reshape(-1)[: groups * group].reshape(-1, k)
        scales[start:stop] = params[:, 0].reshape(-1)[:groups].reshape(-1, k // group)
        biases[start:stop] = params[:, 1].reshape(-1)[:groups].reshape(-1, k // group)
    return QuantTensor(codes, scales, biases)


def dequantize(tensor: QuantTensor, group: int) -> F32:
    """Give the weights float32 [n, k] that the codes stand for: scale * q + bias."""
    n, k = tensor.codes.shape
    weight = tensor.codes.reshape(n, k // group, group).astype(np.float32)
    weight *= tensor.scales[..., None].astype(np.float32)
    weight += tensor.biases[..., None].astype(np.float32)
    return weight.reshape(n, k)


def to_mlx(
    tensor: QuantTensor, bits: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Pack for MLX: weight uint32 [n, k*bits/32] (first code in the lowest bits), scales, biases [n, k/group]."""
    codes = tensor.codes
    if bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(codes).view("<u4"), tensor.scales, tensor.biases


def to_float32(array: Array) -> F32:
    """Convert a floating array to float32, C order, in memory of its own."""
    out = np.empty(array.shape, np.float32)
    _copy_float32(array, out)
    return out


def _copy_float32(array: Array, out: F32) -> None:
    """Copy a floating array into `out`; bfloat16 by its bits, several times as fast as a cast."""
    if array.dtype == ml_dtypes.bfloat16:
        np.left_shift(array.view(np.uint16), np.uint32(16), out=out.view(np.uint32))
    else:
        out[...] = array


def _check_range(groups: F32, name: str, first_row: int, k: int) -> None:
    """Refuse NaN, Inf and groups [G, group], rows from `first_row`, whose scale or bias float16 cannot hold."""
    limit = LARGEST
    low, high = float(groups.min()), float(groups.max())
    if -limit <= low and high <= limit and high - low <= limit:
        return
    group = groups.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        lows, highs = groups.min(axis=1), groups.max(axis=1)
        good = (lows >= -limit) & (highs <= limit) & (highs - lows <= limit)
    if good.all():
        return
    bad = int(np.argmin(good))
    row, column = divmod(bad * group, k)
    where = f"{name}: the group at row {first_row + row}, columns {column} to {column + group - 1}"
    if not np.isfinite(groups[bad]).all():
        raise CheckpointError(f"{where}, holds NaN or Inf: the checkpoint is damaged, download or export it again")
    raise CheckpointError(
        f"{where}, spans {lows[bad]:g} to {highs[bad]:g}, beyond float16 (65504), in which scales and biases are "
        "stored: rescale the model's weights or build with --quant none"
    )
