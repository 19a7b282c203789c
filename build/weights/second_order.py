"""Finds codes whose errors cancel in a matrix's product: GPTQ with static groups, and refitted scales.

With inputs x of second moments H = E[x·xᵀ] the error of a row is (w - ŵ)·H·(w - ŵ)ᵀ. GPTQ (Frantar et al.,
2022) rounds one input after the other, those with the largest moments first, and moves the weights of the
remaining inputs to compensate, by the rows of the upper Cholesky factor of H⁻¹. Groups are static: their
scales and biases are found first, by the weighted search of quantize.py, so that the order of inputs need not
be stored. Then scale and bias of each group are solved for again with the codes held fixed, in the same norm,
and all of it once more on these grids. They are kept as the scheme stores them: in two levels the factors of
the superblocks stay, and integers are solved for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.build.weights.quantize import F32, Scheme, quantize, scales_and_biases, stack
from nearfar.build.weights.slab import LARGEST
from nearfar.kernels.codes import pack_codes
from nearfar.kernels.quantized import Array, QuantTensor
from nearfar.processors import processors

F64 = npt.NDArray[np.float64]
DAMPING = 0.01
"""The share of the mean moment that is added to each moment, as published (GPTQ). Between 0.001 and 0.05
perplexity changes by noise only.
"""
BLOCK = 16
"""Inputs whose errors are propagated one by one, not as products of matrices."""
LEAF = 128
"""Rows of a triangular matrix that are inverted by NumPy."""
ROWS = 512
"""Rows that one thread works on."""
ROUNDS = 2
SMALLEST = 2.0**-14  # the smallest normal float16
WORKERS = processors()


@dataclass(frozen=True)
class Curvature:
    """The curvature of a matrix's error. `moments` float32 [k, k], damped; `order`: the inputs, the largest
    moment first; `factor`: the upper Cholesky factor of the inverse in that order.
    """

    moments: F32
    order: npt.NDArray[np.int64]
    factor: F32

    @staticmethod
    def of(moments: F64) -> Curvature:
        """The curvature for the moments E[x·xᵀ] [k, k]."""
        damped = np.array(moments, np.float64)
        diagonal = np.einsum("ii->i", damped)
        diagonal += DAMPING * max(float(diagonal.mean()), 1e-12)
        order = np.argsort(-diagonal, kind="stable")
        # H = U·Uᵀ with U upper, from the Cholesky factor of H in reverse order; then H⁻¹ = U⁻ᵀ·U⁻¹
        reverse = order[::-1]
        lower = np.asarray(np.linalg.cholesky(damped[reverse][:, reverse]), np.float64)
        factor = inverse_of_lower(lower)[::-1, ::-1]
        return Curvature(damped.astype(np.float32), order, np.ascontiguousarray(factor, np.float32))

    @property
    def importance(self) -> F32:
        """The second moment of each input, [k]."""
        return np.ascontiguousarray(np.diagonal(self.moments))


def inverse_of_lower(lower: F64) -> F64:
    """Invert a lower triangular matrix [k, k] by halves: a quarter of the operations of `np.linalg.inv`."""
    k = len(lower)
    if k <= LEAF:
        return np.asarray(np.linalg.inv(lower))
    half = k // 2
    first, last = inverse_of_lower(lower[:half, :half]), inverse_of_lower(lower[half:, half:])
    out = np.zeros_like(lower)
    out[:half, :half], out[half:, half:] = first, last
    out[half:, :half] = -last @ (lower[half:, :half] @ first)
    return out


def quantize_second_order(weight: Array, scheme: Scheme, name: str, curvature: Curvature) -> QuantTensor:
    """Quantize a matrix [n, k] with the least error found in the norm of its inputs; errors as `quantize`."""
    found = quantize(weight, scheme, name, curvature.importance)
    wide = np.asarray(weight, np.float32)

    def solved(start: int) -> QuantTensor:
        rows = _Rows(wide[start : start + ROWS], found[slice(start, start + ROWS)], scheme, curvature)
        for _ in range(ROUNDS):
            rows.round()
            rows.refit()
        return rows.tensor()

    with ThreadPoolExecutor(WORKERS) as pool:
        parts = list(pool.map(solved, range(0, len(wide), ROWS)))
    return stack(parts)


def _by_halves(
    first: int,
    last: int,
    most: int,
    some: Callable[[int, int], None],
    carry: Callable[[int, int, int], None],
) -> None:
    """Solve for steps [first, last) in order, at most `most` together with `some(first, last)`. Between two
    halves `carry(first, middle, last)` applies what the first has changed to all of the second.
    """
    if last - first <= most:
        some(first, last)
        return
    middle = (first + last) // 2
    _by_halves(first, middle, most, some, carry)
    carry(first, middle, last)
    _by_halves(middle, last, most, some, carry)


def error(weight: F32, rounded: F32, moments: F32) -> float:
    """Σ over rows of (w - ŵ)·H·(w - ŵ)ᵀ."""
    difference = np.asarray(weight, np.float32) - rounded
    return float(np.einsum("ij,ij->", difference @ moments, difference, dtype=np.float64))


class _Rows:
    """Rows of a matrix during the search: `codes` float32 [n, k], `scale` and `bias` float32 [n, groups]."""

    def __init__(self, weight: F32, start: QuantTensor, scheme: Scheme, curvature: Curvature) -> None:
        self.weight, self.scheme, self.curvature = weight, scheme, curvature
        self.scale, self.bias = scales_and_biases(start, scheme.scales)
        self.codes = np.zeros_like(weight)
        self.units = start.units

    def round(self) -> None:
        """Round with GPTQ's pass over the inputs, on the current grids."""
        order, factor, group = self.curvature.order, self.curvature.factor, self.scheme.group_size
        # the rows of these arrays are inputs, so that an input's values are contiguous
        left = np.ascontiguousarray(self.weight.T[order])
        errors, codes = np.empty_like(left), np.empty_like(left)
        scales, biases = (np.ascontiguousarray(values.T) for values in (self.scale, self.bias))
        divisors = scales if self.units is None else np.where(scales == 0, np.inf, scales)
        top = np.float32(2**self.scheme.bits - 1)

        def some(first: int, last: int) -> None:
            for at in range(first, last):
                input = order[at]
                scale, bias = scales[input // group], biases[input // group]
                code = np.rint((left[at] - bias) / divisors[input // group])
                np.clip(code, 0, top, out=code)
                codes[input] = code
                errors[at] = (left[at] - (scale * code + bias)) / factor[at, at]
                left[at + 1 : last] -= factor[at, at + 1 : last, None] * errors[at]

        def carry(first: int, middle: int, last: int) -> None:
            left[middle:last] -= factor[first:middle, middle:last].T @ errors[first:middle]

        _by_halves(0, len(left), BLOCK, some, carry)
        self.codes = np.ascontiguousarray(codes.T)

    def refit(self) -> None:
        """Refit scale and bias of each group in turn, with the codes fixed: the two normal equations in the
        moments' norm. They are kept where they lower the error after rounding to float16.
        """
        moments, group = self.curvature.moments, self.scheme.group_size
        spread = (self.weight - self._rounded()) @ moments
        changes = np.empty_like(spread)

        def one(index: int, _: int) -> None:
            inside = slice(index * group, (index + 1) * group)
            local, codes = moments[inside, inside], self.codes[:, inside]
            by_codes = codes @ local
            a, b, c = (by_codes * codes).sum(1), by_codes.sum(1), local.sum()
            first, second = (spread[:, inside] * codes).sum(1), spread[:, inside].sum(1)
            if self.scheme.scales.offsets:
                slope, shift = _both(a, b, c, first, second)
            else:  # the bias is −zero · scale
                zero = self.scheme.scales.zero(self.scheme.bits)
                slope = (first - zero * second) / np.maximum(a - zero * (2 * b - zero * c), 1e-30)
                shift = -zero * slope
            scale, bias = self._stored(index, self.scale[:, index] + slope, self.bias[:, index] + shift)
            change = (self.scale[:, index] - scale)[:, None] * codes + (self.bias[:, index] - bias)[:, None]
            gain = (change * (change @ local)).sum(1) + 2 * (change * spread[:, inside]).sum(1)
            better = gain < 0
            self.scale[:, index] = np.where(better, scale, self.scale[:, index])
            self.bias[:, index] = np.where(better, bias, self.bias[:, index])
            changes[:, inside] = change * better[:, None]

        def carry(first: int, middle: int, last: int) -> None:
            done, later = slice(first * group, middle * group), slice(middle * group, last * group)
            spread[:, later] += changes[:, done] @ moments[done, later]

        _by_halves(0, self.scale.shape[1], 1, one, carry)

    def _stored(self, index: int, scale: F32, bias: F32) -> tuple[F32, F32]:
        """The nearest scale and bias of group `index` that the scheme stores."""
        scales = self.scheme.scales
        if self.units is None:
            if scales.offsets:
                return _float16(scale, SMALLEST), _float16(bias)
            size = _float16(np.minimum(np.abs(scale), LARGEST / scales.zero(self.scheme.bits)), SMALLEST)
            scale = np.copysign(size, scale)
            return scale, scale * np.float32(-scales.zero(self.scheme.bits))
        unit, least = self._factors(index * self.units.shape[1] // self.scale.shape[1])
        most = 2**scales.bits - 1
        return (
            np.clip(np.rint(scale / unit), 0, most).astype(np.float32) * unit,
            np.clip(np.rint(-bias / least), 0, most).astype(np.float32) * -least,
        )

    def _factors(self, superblock: int | slice) -> tuple[F32, F32]:
        """The factors of scales and offsets, float32; both are above 0."""
        assert self.units is not None
        wide = self.units.astype(np.float32)
        return wide[:, superblock, 0], wide[:, superblock, 1]

    def tensor(self) -> QuantTensor:
        """The rows as a quantized tensor."""
        words, bits = pack_codes(self.codes.astype(np.uint8), self.scheme.bits), self.scheme.bits
        if self.units is None:
            return QuantTensor(words, self.scale.astype(np.float16), self.bias.astype(np.float16), bits)
        per = self.scale.shape[1] // self.units.shape[1]
        unit, least = (np.repeat(factor, per, axis=1) for factor in self._factors(slice(None)))
        scales, offsets = (np.rint(wide).astype(np.uint8) for wide in (self.scale / unit, -self.bias / least))
        return QuantTensor(words, scales, offsets, bits, self.units)

    def _rounded(self) -> F32:
        n, k = self.codes.shape
        by_group = self.codes.reshape(n, -1, self.scheme.group_size)
        return np.asarray((by_group * self.scale[..., None] + self.bias[..., None]).reshape(n, k))


def _both(a: F32, b: F32, c: Any, first: F32, second: F32) -> tuple[F32, F32]:
    """Solve two normal equations for the changes of a scale and a bias; where all codes are equal, the scale
    stays.
    """
    determinant = a * c - b * b
    solvable = determinant > 1e-6 * a * c
    safe = np.where(solvable, determinant, 1)
    slope = np.where(solvable, (c * first - b * second) / safe, 0)
    shift = np.where(solvable, (a * second - b * first) / safe, second / max(float(c), 1e-30))
    return slope, shift


def _float16(values: Any, least: float | None = None) -> F32:
    """Round to float16: scales to at least `least`, biases to zero instead of subnormal numbers."""
    bounded: Any = np.clip(values, -LARGEST if least is None else least, LARGEST)
    if least is None:
        bounded = np.where(np.abs(bounded) < SMALLEST, 0, bounded)
    return np.asarray(bounded.astype(np.float16), np.float32)
