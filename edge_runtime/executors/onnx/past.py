"""Keys and values in two forms: pages, as the engine's bookkeeping has them, and contiguous sequences for the
graph.

GroupQueryAttention reads a sequence's past as one array. Given one array as both past and present, it appends
in place. So the sequences of the last batch stay laid out: while the next step continues the same ones, only
the new positions are copied to their pages. Other sequences are gathered from the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.executors.onnx.spans import SpanBatch
from nearfar.format.manifest import Cache, Group, KvCache
from nearfar.format.sizes import pages_for

Array = npt.NDArray[Any]
ROOM = 256
"""Positions by which laid-out sequences grow."""


@dataclass
class LaidOut:
    """Contiguous sequences: for each cache keys and values [B, kv_heads, room, head_dim].

    `slots`, `lengths` [B]; `tables`: for each group the pages [B, columns] with the same content.
    """

    arrays: list[tuple[Array, Array]]
    slots: Array
    lengths: Array
    tables: list[Array]

    @property
    def room(self) -> int:
        """Positions that the arrays have room for."""
        return int(self.arrays[0][0].shape[2])

    def continues(self, batch: SpanBatch, tables: Sequence[Array], page_size: int) -> bool:
        """Whether the batch continues these sequences, in the same pages."""
        if not np.array_equal(self.slots, batch.slots) or not np.array_equal(self.lengths, batch.starts):
            return False
        if self.room < batch.total:
            return False
        used = pages_for(int(self.lengths.max()), page_size)
        return all(
            np.array_equal(old[:, :used], new[self.slots, :used])
            for old, new in zip(self.tables, tables, strict=True)
        )


class PagedPast:
    """The pages of every cache, and the sequences laid out last: one set for single tokens, one
    for several.
    """

    def __init__(
        self, cache: Cache, groups: Sequence[Group], caches: Sequence[KvCache], pages: Sequence[int]
    ) -> None:
        """`pages`: by group."""
        self._size, self._groups, self._caches = cache.page_size, groups, caches
        self.pages = [
            tuple(np.zeros((pages[c.group], c.kv_heads, self._size, c.head_dim), np.float32) for _ in "kv")
            for c in caches
        ]
        self._laid_out: dict[bool, LaidOut] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pages and of the laid-out sequences."""
        laid_out = (pair for each in self._laid_out.values() for pair in each.arrays)
        return sum(array.nbytes for pair in (*self.pages, *laid_out) for array in pair)

    def lay_out(self, batch: SpanBatch, tables: Sequence[Array]) -> LaidOut:
        """Lay out the sequences of a batch, with room for its new positions. `tables`: the page table of each
        group.
        """
        found = self._laid_out.get(batch.single)
        if found is not None and found.continues(batch, tables, self._size):
            return found
        room = -(-batch.total // ROOM) * ROOM
        fits = found is not None and found.room >= room and len(found.slots) == len(batch.slots)
        arrays = found.arrays if found is not None and fits else self._arrays(len(batch.slots), room)
        for index, pair in enumerate(arrays):
            group = self._caches[index].group
            for row, (slot, start) in enumerate(zip(batch.slots, batch.starts.tolist(), strict=True)):
                self._gather(index, tables[group][slot], start, [array[row] for array in pair])
        held = [table[batch.slots].copy() for table in tables]
        self._laid_out[batch.single] = LaidOut(arrays, batch.slots, batch.starts, held)
        return self._laid_out[batch.single]

    def store(self, batch: SpanBatch, laid_out: LaidOut, tables: Sequence[Array]) -> None:
        """Copy the positions that the graph has appended to their pages."""
        at = batch.starts[:, None] + np.arange(batch.count)  # [B, count]
        row = np.arange(len(at))[:, None]
        written = []
        for table in tables:
            written.append(table[batch.slots[:, None], at // self._size])
        for index, pair in enumerate(laid_out.arrays):
            pages = written[self._caches[index].group]
            for array, target in zip(pair, self.pages[index], strict=True):
                target[pages, :, at % self._size] = array[row, :, at]
        laid_out.lengths = batch.starts + batch.count
        laid_out.tables = [table[batch.slots].copy() for table in tables]
        self._forget({group: np.unique(pages) for group, pages in enumerate(written)}, but=batch.single)

    def read(self, group: int, pages: Sequence[int]) -> dict[int, tuple[Array, ...]]:
        """Copies of pages of a group: keys and values by cache."""
        own = (i for i, cache in enumerate(self._caches) if cache.group == group)
        return {i: tuple(array[list(pages)] for array in self.pages[i]) for i in own}

    def write(self, group: int, pages: Sequence[int], content: Mapping[int, Sequence[Array]]) -> None:
        """Overwrite pages of a group."""
        for index, pair in content.items():
            for target, values in zip(self.pages[index], pair, strict=True):
                target[list(pages)] = values
        self._forget({group: np.array(pages)})

    def _arrays(self, count: int, room: int) -> list[tuple[Array, Array]]:
        def empty(c: KvCache) -> Array:
            return np.zeros((count, c.kv_heads, room, c.head_dim), np.float32)

        return [(empty(cache), empty(cache)) for cache in self._caches]

    def _gather(self, index: int, table: Array, start: int, targets: Sequence[Array]) -> None:
        """Copy the positions of a sequence that are still attended to from its pages into `targets`.

        `targets` are [kv_heads, room, head_dim]. Earlier pages may have been released; their positions become
        0, and are masked.
        """
        window = self._groups[self._caches[index].group].window
        first = 0 if window is None else max(0, start - window + 1) // self._size
        used = table[first : pages_for(start, self._size)]
        begin = first * self._size
        for array, target in zip(self.pages[index], targets, strict=True):
            target[:, :begin] = 0
            target[:, start:] = 0
            heads, dim = target.shape[0], target.shape[2]
            stretch = array[used].swapaxes(0, 1).reshape(heads, -1, dim)
            target[:, begin:start] = stretch[:, : start - begin]

    def _forget(self, written: Mapping[int, Array], but: bool | None = None) -> None:
        """Drop laid-out sequences whose pages have been written since."""
        for key, laid_out in list(self._laid_out.items()):
            if key != but and any(np.isin(laid_out.tables[g], pages).any() for g, pages in written.items()):
                del self._laid_out[key]
