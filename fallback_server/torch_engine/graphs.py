"""Decode steps in fixed shapes, which a GPU can replay as CUDA graphs instead of launching each kernel
again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from nearfar.fallback_server.torch_engine.cache import Batch, DecodeGroup, KVCache, PagedStep
from nearfar.fallback_server.torch_engine.model import PagedModel

WARM_UPS = 2  # eager runs before a capture: libraries allocate their workspaces then

MOST_PADDING = 4
"""Largest ratio of the pages that a fixed shape gathers to the pages of the batch. Powers of two alone cost
up to that; one long sequence among 32 short ones would cost 38 times, more than launching the kernels one by
one.
"""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Shape:
    """One fixed shape. The rows of `packed`, int64 [4, rows], are tokens, positions, write rows and lengths;
    `pages` is int64 [rows, width].
    """

    packed: torch.Tensor
    pages: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """Runs steps of single rows, padded to a power of two of rows and of pages. Each shape is captured when
    it first occurs.

    With `capture` False it runs the same computation eagerly, on any device.
    """

    def __init__(self, model: PagedModel, cache: KVCache, *, capture: bool) -> None:
        self._model = model
        self._cache = cache
        self._capture = capture
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._pool: Any = None
        self._off = False

    def fits(self, batch: Batch) -> bool:
        """Whether every chunk is one row, and few pages of the fixed shape are padding."""
        if self._off or batch.step.prefill:
            return False
        rows, width = _shape_of(batch)
        return rows * width <= MOST_PADDING * sum(len(chunk.pages) for chunk in batch.chunks)

    def run(self, batch: Batch) -> torch.Tensor:
        """Return logits float32 [rows, vocab] of all rows of the batch, in its order; valid until the next
        run.
        """
        if batch.fresh is not None:
            self._cache.clear(batch.fresh)
        count = len(batch.chunks)
        rows, width = _shape_of(batch)
        shape = self._shapes.get((rows, width)) or self._allocate(rows, width)
        self._fill(shape, batch)
        if shape.graph is not None:
            shape.graph.replay()
        elif self._capture:
            try:
                self._record(shape)
            except torch.OutOfMemoryError as error:
                self._give_up(error)
                return self._model.forward(batch, torch.arange(count, device=self._cache.device))
        else:
            shape.logits = self._forward(shape)
        assert shape.logits is not None
        return shape.logits[:count]

    def _give_up(self, error: Exception) -> None:
        """Stop using fixed shapes, because the cache leaves too little memory for one."""
        log.warning(
            "there is no memory for decode steps of a fixed shape: from now on they are launched kernel by "
            "kernel; give the cache less (--kv-memory): %s", error,
        )  # fmt: skip
        self._off = True
        self._shapes.clear()

    def _allocate(self, rows: int, width: int) -> _Shape:
        device = self._cache.device
        shape = _Shape(
            torch.zeros(4, rows, dtype=torch.int64, device=device),
            torch.zeros(rows, width, dtype=torch.int64, device=device),
        )
        self._shapes[rows, width] = shape
        return shape

    def _fill(self, shape: _Shape, batch: Batch) -> None:
        """Copy a batch into a shape. Rows of padding write to the trash page and read one zero of the padding
        page.
        """
        cache, (rows, width) = self._cache, shape.pages.shape
        count = len(batch.chunks)
        spare = rows - count
        table = [[*chunk.pages, *[cache.padding] * (width - len(chunk.pages))] for chunk in batch.chunks]
        table += [[cache.padding] * width] * spare
        lengths = [chunk.start + 1 for chunk in batch.chunks] + [1] * spare
        assert batch.step.write is not None
        shape.packed.zero_()
        shape.packed[0, :count] = batch.tokens[0]
        shape.packed[1, :count] = batch.positions[0]
        shape.packed[2] = cache.trash * cache.page_size
        shape.packed[2, :count] = batch.step.write
        shape.packed[3].copy_(torch.tensor(lengths, dtype=torch.int64))
        shape.pages.copy_(torch.tensor(table, dtype=torch.int64))

    def _forward(self, shape: _Shape) -> torch.Tensor:
        rows = shape.pages.shape[0]
        # The group is made again each time, so that its masks are computed from `lengths` within the graph.
        group = DecodeGroup(0, rows, shape.pages, shape.packed[3])
        step = PagedStep(self._cache, shape.packed[2], (group,), ())
        every = torch.arange(rows, device=self._cache.device)
        return self._model.logits(shape.packed[0:1], shape.packed[1:2], step, every)

    def _record(self, shape: _Shape) -> None:
        """Run eagerly, then capture. A model that cannot be captured runs eagerly from then on. Raises
        torch.OutOfMemoryError where the shape does not fit.
        """
        for _ in range(WARM_UPS):
            shape.logits = self._forward(shape)
        torch.cuda.synchronize(self._cache.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                captured = self._forward(shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning(
                "decode steps cannot be captured as CUDA graphs and are launched kernel by kernel: %s", error
            )
            self._capture = False
            return
        self._pool = graph.pool()
        # A capture computes nothing; the replay computes this first step.
        graph.replay()
        shape.graph, shape.logits = graph, captured


def _shape_of(batch: Batch) -> tuple[int, int]:
    """The rows of a batch's fixed shape, and the pages of each row."""
    return _bucket(len(batch.chunks)), _bucket(max(len(chunk.pages) for chunk in batch.chunks))


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
