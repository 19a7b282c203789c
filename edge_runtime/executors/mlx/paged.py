"""A step's rows over the paged cache, for the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.calls import Arrays, Rule
from nearfar.edge_runtime.executors.mlx.paged_cache import PagedCache
from nearfar.edge_runtime.executors.mlx.rope import Rotator, Turn
from nearfar.edge_runtime.executors.mlx.rows import Array, LiveRows
from nearfar.step.ops import Attend

LayOut = Callable[[Array | None], list[LiveRows]]
"""Lays out some of the live rows (None: all of them) for each group of caches."""


class PagedRun:
    """See calls.Run. Values are [M, width] or [M, heads, head_dim]."""

    def __init__(
        self,
        tokens: mx.array,
        lay_out: LayOut,
        wanted: Array,
        cache: PagedCache,
        ropes: Mapping[str, Rotator],
    ) -> None:
        """`wanted`: the live rows whose logits are needed, each once."""
        self._tokens, self._lay_out, self._wanted = tokens, lay_out, wanted
        self._cache, self._ropes = cache, ropes
        self._rows: Sequence[LiveRows] = lay_out(None)
        """The rows as each group of caches lays them out."""
        self._turns: dict[str, Turn] = {}

    @property
    def tokens(self) -> mx.array:
        """See Run."""
        return self._tokens

    def positions(self) -> mx.array:
        """See Run."""
        return mx.array(self._rows[0].positions.astype(np.float32))[:, None]

    def columns(self, x: mx.array, start: int, end: int) -> mx.array:
        """See Run."""
        return x[:, start:end]

    def rotate(self, rope: str, x: mx.array) -> mx.array:
        """See Run."""
        if rope not in self._turns:
            self._turns[rope] = self._ropes[rope].turn(self._rows[0].positions)
        return self._turns[rope](x)

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """See Run."""
        cells = self._rows[self._cache.group(cache)].cells
        self._cache.append(cache, (keys.swapaxes(0, 1), values.swapaxes(0, 1)), cells)

    def before(self, cache: int, taps: int, x: mx.array) -> mx.array:
        """See Run."""
        rows = self._rows[self._cache.group(cache)]
        self._cache.append(cache, (x[None],), rows.cells)
        found, there = self._cache.taken(cache, rows.taps[taps].cells), rows.taps[taps].there
        return found if there is None else mx.where(there, found, mx.array(0.0))

    def recur(self, cache: int, parts: Arrays, rule: Rule) -> mx.array:
        """See Run."""
        found, turns = [], self._rows[self._cache.group(cache)].turns
        for turn in turns:
            state = self._cache.states(cache, turn.before)
            out, after = rule(state, [turn.take(part) for part in parts])
            self._cache.keep(cache, turn.pages, after)
            found.append(mx.flatten(out, 1, 2))
        order = np.concatenate([turn.rows.ravel() for turn in turns])
        whole = found[0] if len(found) == 1 else mx.concatenate(found, axis=1)
        if bool((np.diff(order) == 1).all()):
            return whole
        return whole[:, mx.array(np.argsort(order).astype(np.int32))]

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """See Run."""
        spans = self._rows[self._cache.group(op.cache)].spans
        heads = queries.swapaxes(0, 1)
        if len(spans) == 1:
            return self._cache.attend(op, heads, spans[0].reach[op.window], sinks)
        parts = [
            self._cache.attend(op, heads[:, span.row : span.row + span.count], span.reach[op.window], sinks)
            for span in spans
        ]
        return mx.concatenate(parts, axis=0)

    def choose(self, arrays: Arrays) -> list[mx.array]:
        """See Run."""
        if len(self._wanted) == len(self._rows[0]):
            return list(arrays)
        chosen = mx.array(self._wanted.astype(np.int32))
        self._rows, self._turns = self._lay_out(self._wanted), {}
        return [array[chosen] for array in arrays]
