"""The paged cache on MLX arrays: keys and values of each layer, as floats or quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.artifact.budget import kv_group
from nearfar.edge_runtime.executors.base import Array
from nearfar.edge_runtime.executors.mlx import attention
from nearfar.edge_runtime.executors.mlx.rows import Reach
from nearfar.step.ops import Attend

Parts = list[mx.array]
"""[values], or [codes, scales, biases] of a quantized cache; each [kv_heads, cells, width]."""

FIRST_PAGES = 64
"""The pages of a new cache: MLX has no memory that is free until its first use."""


class Shape(Protocol):
    """The geometry of one cache."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys, and of values."""
        ...

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        ...

    @property
    def group(self) -> int:
        """The group of the cache: caches of a group share pages."""
        ...


@dataclass(frozen=True)
class Layout:
    """The geometry of all caches. `pages`: by group. `bits` None: floats of `dtype`; else `dtype` is the type
    of scales.
    """

    caches: tuple[Shape, ...]
    page_size: int
    pages: tuple[int, ...]
    dtype: mx.Dtype
    bits: int | None = None

    def quantum(self, cache: int) -> int:
        """The number of values that share a scale in a quantized cache; 0 if it has floats."""
        return kv_group(self.caches[cache].head_dim, self.bits) if self.bits else 0


class PagedCache:
    """Keys and values in pages: a page is page_size cells in every array of its group. The engine assigns
    pages.

    Arrays are replaced, never changed: an append makes a new array in the memory of the old one, if nothing
    else refers to the old one and no work in flight reads it. The executor makes sure of the latter (see
    MlxExecutor), so that no step copies the cache. The arrays grow as higher pages come into use.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._quanta = [layout.quantum(index) for index in range(len(layout.caches))]
        self._pages = [0] * len(layout.pages)
        self._arrays: list[Parts] = [[] for _ in range(2 * len(layout.caches))]
        for group, pages in enumerate(layout.pages):
            self._grow(group, min(FIRST_PAGES, pages))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, with the work queued so far included."""
        return [part for parts in self._arrays for part in parts]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def group(self, cache: int) -> int:
        return self.layout.caches[cache].group

    def head_dim(self, cache: int) -> int:
        """Values of one head of a cache."""
        return self.layout.caches[cache].head_dim

    def hold(self, group: int, cell: int) -> None:
        """Make room for a cell. The arrays at least double, so that growing copies each cell
        once on average.
        """
        page = cell // self.layout.page_size
        if page >= self._pages[group]:
            self._grow(group, min(self.layout.pages[group], max(page + 1, 2 * self._pages[group])))

    def append(self, cache: int, keys: mx.array, values: mx.array, cells: slice | mx.array) -> None:
        """Store keys and values [kv_heads, rows, head_dim] of a layer in `cells`."""
        for index, rows in ((2 * cache, keys), (2 * cache + 1, values)):
            for part, new in zip(self._arrays[index], self._encode(cache, rows), strict=True):
                part[:, cells] = new  # the assignment replaces the array, also in the list

    def attend(self, op: Attend, queries: mx.array, reach: Reach, sinks: mx.array | None) -> mx.array:
        """Attention of rows with the same reach: queries [heads, rows, head_dim] in, [rows, width] out."""
        index, size = 2 * op.cache, self.layout.page_size
        keys, values = ([_view(part, reach, size) for part in self._arrays[index + i]] for i in (0, 1))
        if fused(op, self.layout.bits):
            out = mx.fast.scaled_dot_product_attention(
                queries[None], keys[0][None], values[0][None], scale=op.scale, mask=reach.mask, sinks=sinks
            )
            return out.swapaxes(1, 2).reshape(queries.shape[1], -1)
        out = self._attend_plainly(op, queries, keys, values, reach.mask, sinks)
        return mx.flatten(out.swapaxes(0, 1), -2, -1)

    def read(self, group: int, pages: Sequence[int]) -> dict[str, mx.array]:
        """Whole pages by Executor.read_pages' names: [pages, kv_heads, page_size, width], not
        evaluated yet.
        """
        cells, size = self._cells(group, pages), self.layout.page_size
        return {
            name: part[:, cells].reshape(part.shape[0], len(pages), size, part.shape[2]).swapaxes(0, 1)
            for name, part in self._named(group)
        }

    def write(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """Overwrite whole pages with arrays as `read` returns them."""
        cells = self._cells(group, pages)
        for name, part in self._named(group):
            data = mx.array(content[name]).swapaxes(0, 1)
            part[:, cells] = data.reshape(part.shape[0], -1, part.shape[2])

    def shapes(self, group: int, pages: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shape and dtype of each array that `read` returns for `pages` pages."""
        size = self.layout.page_size
        kinds: dict[Any, np.dtype[Any]] = {
            mx.uint32: np.dtype("uint32"), mx.float16: np.dtype("float16"), mx.float32: np.dtype("float32"),
        }  # fmt: skip
        return {
            name: ((pages, p.shape[0], size, p.shape[2]), kinds[p.dtype]) for name, p in self._named(group)
        }

    def _named(self, group: int) -> list[tuple[str, mx.array]]:
        endings = [""] if self.layout.bits is None else [".codes", ".scales", ".biases"]
        return [
            (f"kv.{cache}.{kind}{ending}", part)
            for cache, shape in enumerate(self.layout.caches)
            for kind, parts in zip("kv", self._arrays[2 * cache : 2 * cache + 2], strict=True)
            for ending, part in zip(endings, parts, strict=True)
            if shape.group == group
        ]

    def _cells(self, group: int, pages: Sequence[int]) -> slice | mx.array:
        """The cells of whole pages, as a slice if they are contiguous: several times as fast as a gather."""
        size, index = self.layout.page_size, np.asarray(pages, np.int32)
        self.hold(group, (int(index.max()) + 1) * size - 1)
        if (np.diff(index) == 1).all():
            return slice(int(index[0]) * size, (int(index[-1]) + 1) * size)
        return mx.array((index[:, None] * size + np.arange(size, dtype=np.int32)).ravel())

    def _grow(self, group: int, pages: int) -> None:
        cells = (pages - self._pages[group]) * self.layout.page_size
        for cache, shape in enumerate(self.layout.caches):
            if shape.group != group:
                continue
            for index in (2 * cache, 2 * cache + 1):
                old, self._arrays[index] = self._arrays[index], []
                more = self._encode(
                    cache, mx.zeros((shape.kv_heads, cells, shape.head_dim), self.layout.dtype)
                )
                parts = (
                    [mx.concatenate(list(both), axis=1) for both in zip(old, more, strict=True)]
                    if old
                    else more
                )
                mx.eval(
                    parts
                )  # the arrays grow one by one, so that only one old array exists beside its larger copy
                del old
                self._arrays[index] = parts
        self._pages[group] = pages

    def _encode(self, cache: int, rows: mx.array) -> Parts:
        if self.layout.bits is None:
            return [rows.astype(self.layout.dtype)]
        return list(mx.quantize(rows, group_size=self._quanta[cache], bits=self.layout.bits))

    def _attend_plainly(
        self,
        op: Attend,
        queries: mx.array,
        keys: Parts,
        values: Parts,
        mask: str | mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention by two products; query heads with the same keys are rows of one product."""
        heads, rows, head_dim = queries.shape
        kv_heads = keys[0].shape[0]
        shared = (kv_heads, heads // kv_heads, rows, -1)
        grouped = (queries * op.scale).reshape(kv_heads, -1, head_dim)
        scores = self._product(op.cache, grouped, keys, transpose=True).reshape(shared)
        assert not isinstance(mask, str), "the rows were laid out for the fused kernel"
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1, 1, 1)
        found = attention.weights(scores, mask, op.softcap, sinks).reshape(kv_heads, -1, scores.shape[-1])
        return self._product(op.cache, found, values, transpose=False).reshape(heads, rows, head_dim)

    def _product(self, cache: int, x: mx.array, parts: Parts, transpose: bool) -> mx.array:
        if self.layout.bits is None:
            return x @ (parts[0].swapaxes(-1, -2) if transpose else parts[0])
        codes, scales, biases = parts
        group, bits = self._quanta[cache], self.layout.bits
        return mx.quantized_matmul(x, codes, scales, biases, transpose=transpose, group_size=group, bits=bits)


def fused(op: Attend, bits: int | None) -> bool:
    """Whether MLX's kernel computes this attention over a cache of `bits` bits (None: floats)."""
    return bits is None and op.softcap is None


def _view(part: mx.array, reach: Reach, page_size: int) -> mx.array:
    """The cells of a reach, [kv_heads, count, width]; not copied if they are contiguous."""
    if reach.pages is not None:
        pages = part.reshape(part.shape[0], -1, page_size, part.shape[2])[:, reach.pages]
        return pages.reshape(part.shape[0], -1, part.shape[2])[:, reach.skip : reach.skip + reach.count]
    runs = [part[:, start:end] for start, end in reach.runs]
    return runs[0] if len(runs) == 1 else mx.concatenate(runs, axis=1)
