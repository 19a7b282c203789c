"""The paged cache on MLX arrays: keys and values of each layer, as floats or quantized, and what layers keep
besides, in float32.
"""

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
from nearfar.edge_runtime.executors.mlx.tensors import PageTensor, Parts
from nearfar.format.buffers import of_cache
from nearfar.step import shapes
from nearfar.step.ops import Attend

FIRST_PAGES = 64
"""The pages of a new cache: MLX has no memory that is free until its first use."""


class GroupedCache(shapes.CacheShape, Protocol):
    """The sizes of a cache, and its group: caches of a group share pages."""

    @property
    def group(self) -> int:
        """The number of the group."""
        ...


@dataclass(frozen=True)
class CacheGeometry:
    """The geometry of all caches. `pages`: by group. `bits` None: floats of `dtype`; else `dtype` is the type
    of scales.
    """

    caches: tuple[GroupedCache, ...]
    page_size: int
    pages: tuple[int, ...]
    dtype: mx.Dtype
    bits: int | None = None

    def tensors(self, cache: int) -> tuple[PageTensor, ...]:
        """The tensors of a cache, without pages. A page of a state is its `depth` rows."""
        shape = self.caches[cache]
        dtype, bits = (self.dtype, self.bits) if shape.parts == "kv" else (mx.float32, None)
        quantum, size = kv_group(shape.head_dim, bits) if bits else 0, shape.depth or self.page_size
        return tuple(
            PageTensor(name, shape.group, shape.kv_heads, size, shape.head_dim, dtype, bits, quantum)
            for name in of_cache(cache, shape.parts)
        )


class PagedCache:
    """What layers keep, in pages: a page is some cells in every array of its group. The engine assigns pages.

    Arrays are replaced, never changed: an append makes a new array in the memory of the old one, if nothing
    else refers to the old one and no work in flight reads it. The executor makes sure of the latter (see
    MlxExecutor), so that no step copies the cache. The arrays grow as higher pages come into use.
    """

    def __init__(self, layout: CacheGeometry) -> None:
        self.layout = layout
        self._pages = [0] * len(layout.pages)
        self._tensors = [layout.tensors(cache) for cache in range(len(layout.caches))]
        for group, pages in enumerate(layout.pages):
            self._grow(group, min(FIRST_PAGES, pages))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, with the work queued so far included."""
        return [part for tensors in self._tensors for tensor in tensors for part in tensor.parts]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def group(self, cache: int) -> int:
        return self.layout.caches[cache].group

    def head_dim(self, cache: int) -> int:
        """Values of one head of a cache."""
        return self.layout.caches[cache].head_dim

    def hold(self, group: int, page: int) -> None:
        """Make room for a page. The arrays at least double, so that growing copies each page
        once on average.
        """
        if page >= self._pages[group]:
            self._grow(group, min(self.layout.pages[group], max(page + 1, 2 * self._pages[group])))

    def append(self, cache: int, parts: Sequence[mx.array], cells: slice | mx.array) -> None:
        """Store rows of each tensor of a cache, [heads, rows, width], in `cells`."""
        for tensor, rows in zip(self._tensors[cache], parts, strict=True):
            tensor.append(rows, cells)

    def taken(self, cache: int, cells: mx.array) -> mx.array:
        """The cells [rows, taps] of a cache of one tensor: [rows, taps, width]."""
        (tensor,) = self._tensors[cache]
        return tensor.parts[0][0][cells]

    def states(self, cache: int, pages: Sequence[int]) -> mx.array:
        """The states in pages, [heads, len(pages), depth, head_dim]; −1 is a state of 0."""
        (tensor,) = self._tensors[cache]
        if all(page < 0 for page in pages):
            return mx.zeros((tensor.heads, len(pages), tensor.size, tensor.width))
        there = [page >= 0 for page in pages]
        cells = tensor.cells([max(page, 0) for page in pages])
        found = mx.unflatten(tensor.parts[0][:, cells], 1, (len(pages), tensor.size))
        return found if all(there) else mx.where(mx.array(there)[:, None, None], found, mx.array(0.0))

    def keep(self, cache: int, pages: Sequence[int], states: mx.array) -> None:
        """Store states as `states` returns them."""
        (tensor,) = self._tensors[cache]
        tensor.append(mx.flatten(states, 1, 2), tensor.cells(pages))

    def attend(self, op: Attend, queries: mx.array, reach: Reach, sinks: mx.array | None) -> mx.array:
        """Attention of rows with the same reach: queries [heads, rows, head_dim] in, [rows, width] out."""
        keys, values = (
            [_view(part, reach, tensor.size) for part in tensor.parts] for tensor in self._tensors[op.cache]
        )
        if fused(op, self.layout.bits):
            out = mx.fast.scaled_dot_product_attention(
                queries[None], keys[0][None], values[0][None], scale=op.scale, mask=reach.mask, sinks=sinks
            )
            return out.swapaxes(1, 2).reshape(queries.shape[1], -1)
        out = self._attend_plainly(op, queries, keys, values, reach.mask, sinks)
        return mx.flatten(out.swapaxes(0, 1), -2, -1)

    def read(self, group: int, pages: Sequence[int]) -> dict[str, mx.array]:
        """Whole pages by Executor.read_pages' names: [pages, heads, cells of a page, width], not
        evaluated yet.
        """
        self.hold(group, max(pages))
        return {
            name: mx.unflatten(part[:, tensor.cells(pages)], 1, (len(pages), tensor.size)).swapaxes(0, 1)
            for tensor in self._of(group)
            for name, part in tensor.named()
        }

    def write(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        """Overwrite whole pages with arrays as `read` returns them."""
        self.hold(group, max(pages))
        for tensor in self._of(group):
            cells = tensor.cells(pages)
            for name, part in tensor.named():
                part[:, cells] = mx.flatten(mx.array(content[name]).swapaxes(0, 1), 1, 2)

    def shapes(self, group: int, pages: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shape and dtype of each array that `read` returns for `pages` pages."""
        kinds: dict[Any, np.dtype[Any]] = {
            mx.uint32: np.dtype("uint32"), mx.float16: np.dtype("float16"), mx.float32: np.dtype("float32"),
        }  # fmt: skip
        return {
            name: ((pages, part.shape[0], tensor.size, part.shape[2]), kinds[part.dtype])
            for tensor in self._of(group)
            for name, part in tensor.named()
        }

    def _of(self, group: int) -> list[PageTensor]:
        return [tensor for tensors in self._tensors for tensor in tensors if tensor.group == group]

    def _grow(self, group: int, pages: int) -> None:
        for tensor in self._of(group):
            tensor.grow(pages - self._pages[group])
        self._pages[group] = pages

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
        group, bits = self._tensors[cache][0].quantum, self.layout.bits
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
