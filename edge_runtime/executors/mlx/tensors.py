"""One tensor of a cache in pages, as an MLX array: floats or codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

Parts = list[mx.array]
"""[values], or [codes, scales, biases] of a quantized cache; each [heads, cells, width]."""

ENDINGS = ("codes", "scales", "biases")


@dataclass
class PageTensor:
    """A page is `size` cells of `width` values in each of `heads` heads. `bits` None: floats of `dtype`; else
    codes, of which `quantum` share a scale of `dtype`.
    """

    name: str
    group: int
    heads: int
    size: int
    width: int
    dtype: mx.Dtype
    bits: int | None = None
    quantum: int = 0
    parts: Parts = field(default_factory=list)

    def encode(self, rows: mx.array) -> Parts:
        """Rows [heads, cells, width] as the tensor stores them."""
        if self.bits is None:
            return [rows.astype(self.dtype)]
        return list(mx.quantize(rows, group_size=self.quantum, bits=self.bits))

    def append(self, rows: mx.array, cells: slice | mx.array) -> None:
        """Store rows [heads, rows, width] in `cells`."""
        for part, new in zip(self.parts, self.encode(rows), strict=True):
            part[:, cells] = new  # the assignment replaces the array, also in the list

    def grow(self, pages: int) -> None:
        """Add pages. Only one old array exists beside its larger copy."""
        old, self.parts = self.parts, []
        more = self.encode(mx.zeros((self.heads, pages * self.size, self.width), self.dtype))
        if old:
            more = [mx.concatenate(list(both), axis=1) for both in zip(old, more, strict=True)]
        mx.eval(more)
        del old
        self.parts = more

    def cells(self, pages: Sequence[int]) -> slice | mx.array:
        """The cells of whole pages, as a slice if they are contiguous: several times as fast as a gather."""
        index = np.asarray(pages, np.int32)
        if (np.diff(index) == 1).all():
            return slice(int(index[0]) * self.size, (int(index[-1]) + 1) * self.size)
        return mx.array((index[:, None] * self.size + np.arange(self.size, dtype=np.int32)).ravel())

    def named(self) -> list[tuple[str, mx.array]]:
        """The arrays by Executor.read_pages' names."""
        if self.bits is None:
            return [(self.name, self.parts[0])]
        return [(f"{self.name}.{part}", array) for part, array in zip(ENDINGS, self.parts, strict=True)]
