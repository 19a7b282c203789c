"""The paged cache on MLX arrays: keys and values of each layer, as floats or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.artifact.budget import kv_group
from nearfar.edge_runtime.executors.base import Array
from nearfar.edge_runtime.executors.mlx.rows import Reach, Span

Parts = list[mx.array]
"""[values], or [codes, scales, biases] of a quantized cache; each [kv_heads, cells, width]."""

FIRST_PAGES = 64
"""Pages to begin with: MLX has no memory that costs nothing until it is used."""


@dataclass(frozen=True)
class Layout:
    """Geometry of the cache. `bits` None: floats of `dtype`; else quantized, scales and biases in `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: mx.Dtype
    bits: int | None = None


class PagedCache:
    """A page is page_size consecutive cells of every array; which pages a sequence has is the engine's affair.

    Arrays are replaced, never changed: an append makes a new array in the memory of the old one, as long as nothing else
    refers to the old one and no work in flight reads it. The executor sees to the second (see MlxExecutor), so that no
    step copies the cache. The arrays grow as higher pages come into use.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._group = kv_group(layout.head_dim, layout.bits) if layout.bits else 0
        self._pages = 0
        self._arrays: list[Parts] = []
        self._scale = layout.head_dim**-0.5
        self._grow(min(FIRST_PAGES, layout.pages))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays as they are after the work queued so far."""
        return [part for parts in self._arrays for part in parts]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def hold(self, cell: int) -> None:
        """Make room for a cell. At least doubles, so that growing costs a copy of each cell on average."""
        page = cell // self.layout.page_size
        if page >= self._pages:
            self._grow(min(self.layout.pages, max(page + 1, 2 * self._pages)))

    def append(self, layer: int, keys: mx.array, values: mx.array, cells: slice | mx.array) -> None:
        """Store keys and values [kv_heads, rows, head_dim] of a layer in so many cells."""
        for index, rows in ((2 * layer, keys), (2 * layer + 1, values)):
            for part, new in zip(self._arrays[index], self._encode(rows), strict=True):
                part[:, cells] = new  # replaces what the array stands for, also in the list

    def attend(self, layer: int, queries: mx.array, span: Span, window: int | None) -> mx.array:
        """Attention of a span: queries [heads, rows, head_dim] in, [rows, heads · head_dim] out."""
        reach = span.reach[window]
        keys, values = ([_view(part, reach, self.layout.page_size) for part in self._arrays[2 * layer + i]] for i in (0, 1))
        if self.layout.bits is None:
            out = mx.fast.scaled_dot_product_attention(
                queries[None], keys[0][None], values[0][None], scale=self._scale, mask=reach.mask
            )[0]
        else:
            out = self._attend_quantized(queries, keys, values, reach.mask)
        return out.swapaxes(0, 1).reshape(span.count, -1)

    def read(self, pages: Sequence[int]) -> dict[str, mx.array]:
        """Whole pages, by Executor.read_pages' names: [pages, kv_heads, page_size, width]. Not evaluated."""
        cells, size = self._cells(pages), self.layout.page_size
        return {
            name: part[:, cells].reshape(part.shape[0], len(pages), size, part.shape[2]).swapaxes(0, 1)
            for name, part in self._named()
        }

    def write(self, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """The reverse of `read`."""
        cells = self._cells(pages)
        for name, part in self._named():
            data = mx.array(content[name]).swapaxes(0, 1)
            part[:, cells] = data.reshape(part.shape[0], -1, part.shape[2])

    def shapes(self, pages: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array that `read` gives for so many pages."""
        size = self.layout.page_size
        kinds: dict[Any, np.dtype[Any]] = {
            mx.uint32: np.dtype("uint32"), mx.float16: np.dtype("float16"), mx.float32: np.dtype("float32"),
        }  # fmt: skip
        return {name: ((pages, p.shape[0], size, p.shape[2]), kinds[p.dtype]) for name, p in self._named()}

    def _named(self) -> list[tuple[str, mx.array]]:
        endings = [""] if self.layout.bits is None else [".codes", ".scales", ".biases"]
        return [
            (f"layers.{index // 2}.{'kv'[index % 2]}{ending}", part)
            for index, parts in enumerate(self._arrays)
            for ending, part in zip(endings, parts, strict=True)
        ]

    def _cells(self, pages: Sequence[int]) -> slice | mx.array:
        """The cells of whole pages, as one stretch where they are one: that is several times as fast as a gather."""
        size, index = self.layout.page_size, np.asarray(pages, np.int32)
        self.hold((int(index.max()) + 1) * size - 1)
        if (np.diff(index) == 1).all():
            return slice(int(index[0]) * size, (int(index[-1]) + 1) * size)
        return mx.array((index[:, None] * size + np.arange(size, dtype=np.int32)).ravel())

    def _grow(self, pages: int) -> None:
        layout = self.layout
        new, old = (pages - self._pages) * layout.page_size, self._arrays
        empty = self._encode(mx.zeros((layout.kv_heads, new, layout.head_dim), layout.dtype))
        mx.eval(empty)
        self._arrays = []
        for index in range(2 * layout.layers):
            parts = [mx.concatenate([before, more], axis=1) for before, more in zip(old[index], empty, strict=True)] \
                if old else [part + 0 for part in empty]  # fmt: skip
            mx.eval(parts)  # one by one, so that only one of the old arrays lives on beside its larger copy
            if old:
                old[index] = []
            self._arrays.append(parts)
        self._pages = pages

    def _encode(self, rows: mx.array) -> Parts:
        if self.layout.bits is None:
            return [rows.astype(self.layout.dtype)]
        return list(mx.quantize(rows, group_size=self._group, bits=self.layout.bits))

    def _attend_quantized(self, queries: mx.array, keys: Parts, values: Parts, mask: str | mx.array | None) -> mx.array:
        """Softmax attention over codes; the heads that share keys are rows of one product."""
        layout, (heads, rows, _) = self.layout, queries.shape
        grouped = (queries * self._scale).reshape(layout.kv_heads, -1, layout.head_dim)
        scores = self._product(grouped, keys, transpose=True)
        if mask is not None:
            assert isinstance(mask, mx.array)
            scores = scores.reshape(layout.kv_heads, heads // layout.kv_heads, rows, -1)
            scores = mx.where(mask, scores, -mx.inf).reshape(layout.kv_heads, -1, mask.shape[1])
        weights = mx.softmax(scores, axis=-1, precise=True)
        out = self._product(weights, values, transpose=False)
        return out.reshape(heads, rows, layout.head_dim)

    def _product(self, x: mx.array, parts: Parts, transpose: bool) -> mx.array:
        codes, scales, biases = parts
        bits = self.layout.bits
        return mx.quantized_matmul(x, codes, scales, biases, transpose=transpose, group_size=self._group, bits=bits)


def _view(part: mx.array, reach: Reach, page_size: int) -> mx.array:
    """The cells of a reach, [kv_heads, count, width]: without a copy where they lie together."""
    if reach.pages is not None:
        pages = part.reshape(part.shape[0], -1, page_size, part.shape[2])[:, reach.pages]
        return pages.reshape(part.shape[0], -1, part.shape[2])[:, reach.skip : reach.skip + reach.count]
    runs = [part[:, start:end] for start, end in reach.runs]
    return runs[0] if len(runs) == 1 else mx.concatenate(runs, axis=1)
