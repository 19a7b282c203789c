"""Rounds scales and offsets of groups to integers that share float16 factors: two levels, as in llama.cpp's
k-quants.

The search starts from the float16 pairs that lose least. The factors of a superblock are the ones with which
its largest scale and its largest offset get the largest integer. Then codes and integers are held fixed while
the factors are solved for by least squares, and all is rounded again. At the end each group takes the
neighbouring integers with the least error.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from nearfar.format.scales import Scales
from nearfar.kernels.quantized import QuantTensor

F32 = npt.NDArray[np.float32]
REFITS = 2
"""How often the factors are solved for."""
NEIGHBOURS = tuple(product((0, -1, 1), repeat=2))
"""Steps of the integers of scale and offset that each group tries at the end."""
SMALLEST, LARGEST = 2.0**-24, 65504.0
"""The smallest float16 above 0, and the largest."""


def two_levels(weight: F32, start: QuantTensor, scales: Scales, importance: F32 | None) -> QuantTensor:
    """Store rows float32 [n, k] in two levels with offsets; `start`: the rows in float16 pairs, in the same
    groups and bits. `importance` [k]: the weight of each input's squared error, None for equal weights.
    """
    search = _Search(weight, start, scales, importance)
    for _ in range(REFITS):
        search.round()
        search.refit()
    search.round()
    search.move()
    return search.tensor()


class _Search:
    """Rows during the search. Arrays have the axes [row, superblock, group of a superblock, input of a
    group]: `x` weights, `h` their importance, `codes`. Weights are `unit` · `s` · code − `least` · `o`, where
    `s` and `o` are integers; `scale` and `offset` are the values that the two products should have.
    """

    def __init__(self, weight: F32, start: QuantTensor, scales: Scales, importance: F32 | None) -> None:
        n, k = weight.shape
        groups = start.scales.shape[1]
        superblocks = k // scales.superblock
        inside = superblocks, groups // superblocks, k // groups
        self.bits, self.most = start.bits, np.float32(2**scales.bits - 1)
        self.x = weight.reshape(n, *inside)
        even = np.ones(k, np.float32)
        self.h = (even if importance is None else importance.astype(np.float32)).reshape(inside)
        apart = n, *inside[:2]
        scale, bias = (part.astype(np.float32).reshape(apart) for part in (start.scales, start.biases))
        # an offset is subtracted, so weights above 0 alone have codes from 0 on
        self.scale = scale + np.maximum(bias, 0) / np.float32(2**self.bits - 1)
        self.offset = np.maximum(-bias, 0)
        self.unit = self._factor(self.scale.max(2) / self.most)
        self.least = self._factor(self.offset.max(2) / self.most)

    def round(self) -> None:
        """Round scales and offsets to integers of the present factors, then the weights to codes."""
        self.s, self.o = (
            np.clip(np.rint(wide / factor[..., None]), 0, self.most)
            for wide, factor in ((self.scale, self.unit), (self.offset, self.least))
        )
        self.codes, self.error = self._rounded(self.s, self.o)

    def refit(self) -> None:
        """Solve for the two factors of each superblock with the integers and codes held fixed."""
        rises, falls = self.s[..., None] * self.codes, -self.o[..., None]

        def total(values: F32) -> npt.NDArray[np.float64]:
            return np.asarray(np.einsum("nbgi,bgi->nb", values, self.h), np.float64)

        a, b = total(rises * rises), total(rises * falls)
        c = total(np.broadcast_to(falls * falls, rises.shape))
        first, second = total(rises * self.x), total(falls * self.x)
        determinant = a * c - b * b
        solvable = determinant > 1e-6 * a * c
        safe = np.where(solvable, determinant, 1)
        unit = np.where(solvable, (c * first - b * second) / safe, 0).astype(np.float32)
        least = np.where(solvable, (a * second - b * first) / safe, 0).astype(np.float32)
        better = (unit > 0) & (least > 0)
        self.unit = np.where(better, self._factor(unit), self.unit)
        self.least = np.where(better, self._factor(least), self.least)

    def move(self) -> None:
        """Give each group the neighbouring integers with the least error."""
        s, o = self.s, self.o
        for by, beside in NEIGHBOURS[1:]:
            moved = np.clip(s + by, 0, self.most), np.clip(o + beside, 0, self.most)
            codes, error = self._rounded(*moved)
            better = error < self.error
            self.error = np.where(better, error, self.error)
            self.codes = np.where(better[..., None], codes, self.codes)
            self.s, self.o = np.where(better, moved[0], self.s), np.where(better, moved[1], self.o)

    def tensor(self) -> QuantTensor:
        """The rows as they are stored."""
        n = len(self.x)
        s, o, codes = (values.astype(np.uint8).reshape(n, -1) for values in (self.s, self.o, self.codes))
        units = np.stack([self.unit, self.least], axis=2).astype(np.float16)
        return QuantTensor.of_codes(codes, s, o, self.bits, units)

    def _rounded(self, s: F32, o: F32) -> tuple[F32, F32]:
        """The nearest codes on the grids of integers `s` and `o`, and each group's error. With a scale of 0
        all codes stand for one value, so the codes are 0.
        """
        scale, offset = (s * self.unit[..., None])[..., None], (o * self.least[..., None])[..., None]
        codes: F32 = self.x + offset
        codes /= np.where(scale == 0, np.float32(np.inf), scale)
        np.rint(codes, out=codes)
        np.clip(codes, 0, 2**self.bits - 1, out=codes)
        apart = codes * scale
        apart -= offset
        apart -= self.x
        np.square(apart, out=apart)
        return codes, np.einsum("nbgi,bgi->nbg", apart, self.h)

    @staticmethod
    def _factor(values: F32) -> F32:
        """Round factors to float16 above 0."""
        bounded = np.clip(values, SMALLEST, LARGEST).astype(np.float16)
        return bounded.astype(np.float32)
