"""The list of a step in NumPy, row by row, over any memory of keys and values.

nearfar.build.calibration.operations defines what an operation computes. Every other reader is compared with
this one, and this one with transformers (tests/unit/test_models.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nearfar.build.calibration.operations import Update, attention, compute
from nearfar.build.weights.headers import flattened
from nearfar.step import ops
from nearfar.step.model import Model
from nearfar.step.params import Param
from nearfar.step.reading import read_model

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]


class Memory(Protocol):
    """The keys and values that are kept between steps."""

    def append(self, cache: int, *parts: Array) -> None:
        """Keep keys and values of the step's rows, or one tensor: each [M, kv_heads, head_dim]."""
        ...

    def seen(self, cache: int, row: int) -> tuple[Array, ...]:
        """The kept values of the row's sequence up to its position, [positions, kv_heads, head_dim]: at least
        the positions of the cache's window.
        """
        ...

    def state(self, cache: int, row: int) -> Array | None:
        """The state of the row's sequence before its position, [heads, depth, head_dim]; None at 0."""
        ...

    def keep(self, cache: int, row: int, state: Array) -> None:
        """Keep the state of the row's sequence after its position."""
        ...


class Sequence:
    """The memory of one sequence, whose rows may come in any order."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, tuple[Array, ...]]] = {}
        self._states: dict[tuple[int, int], Array] = {}
        self.positions: Array = np.zeros(0, np.int64)

    def append(self, cache: int, *parts: Array) -> None:
        kept = self._kept.setdefault(cache, {})
        for m, position in enumerate(self.positions.tolist()):
            kept[position] = tuple(part[m] for part in parts)

    def seen(self, cache: int, row: int) -> tuple[Array, ...]:
        rows = [self._kept[cache][position] for position in range(self.positions[row] + 1)]
        return tuple(np.stack(part) for part in zip(*rows, strict=True))

    def state(self, cache: int, row: int) -> Array | None:
        position = int(self.positions[row])
        return self._states[cache, position - 1] if position else None

    def keep(self, cache: int, row: int, state: Array) -> None:
        self._states[cache, int(self.positions[row])] = state


def load_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Config and float32 tensors of a checkpoint directory."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    arrays = {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
    return config, {name: array.reshape(flattened(array.shape)) for name, array in arrays.items()}


class StepReference:
    """A model over a checkpoint's tensors: weights and values by their names in the list."""

    def __init__(self, model: Model, tensors: Tensors, dtype: npt.DTypeLike = np.float32) -> None:
        self.model, self.step, self.dtype = model, model.step, np.dtype(dtype)
        self.weights = {param.name: self._weight(param, tensors) for param in self.step.params}
        self.values: dict[str, Array] = {}

    @staticmethod
    def of(path: Path, context: int | None = None, dtype: npt.DTypeLike = np.float32) -> StepReference:
        """The model of a checkpoint directory."""
        config, tensors = load_tensors(path)
        return StepReference(read_model(config, tensors, context).model, tensors, dtype)

    def logits(self, tokens: list[int], chunk: int = 0) -> Array:
        """Logits of every token of one sequence [tokens, vocab], in steps of `chunk` rows; 0: in one step."""
        memory, found = Sequence(), []
        for start in range(0, len(tokens), chunk or len(tokens)):
            part = tokens[start : start + (chunk or len(tokens))]
            memory.positions = np.arange(start, start + len(part))
            found.append(self.run(np.array(part), memory.positions, memory))
        return np.concatenate(found)

    def run(self, tokens: Array, positions: Array, memory: Memory, logit_rows: Array | None = None) -> Array:
        """Run a step; gives logits float [rows, vocab] of `logit_rows` (None: all rows). Rows at position −1
        are padding.
        """
        out = np.zeros(0)
        self.values = {}
        run = _Rows(self, tokens, positions, memory, logit_rows)
        for op in self.step.ops:
            self.values[op.out] = out = compute(run, op)
        return out

    def _weight(self, param: Param, tensors: Tensors) -> Array:
        """Stack the pieces with their rows in order, and compute offset + scale · value."""
        parts = []
        for piece in param.pieces:
            whole = tensors[piece.tensor].swapaxes(-1, -2) if piece.transposed else tensors[piece.tensor]
            rows = whole.reshape(-1, whole.shape[-1]) if param.is_matrix else whole.reshape(-1)
            part = rows[piece.start : piece.start + piece.rows].astype(self.dtype)
            part *= self.dtype.type(piece.scale)
            parts.append(part if piece.order is None else part[piece.order.rows(piece.rows)])
        stacked = np.concatenate(parts)
        return stacked * self.dtype.type(param.scale) + self.dtype.type(param.offset)


class _Rows:
    """The rows of one step; see nearfar.build.calibration.operations.Run."""

    def __init__(
        self, model: StepReference, tokens: Array, positions: Array, memory: Memory, rows: Array | None
    ) -> None:
        self.step, self.weights, self.values = model.step, model.weights, model.values
        self.tokens, self.positions = tokens, positions
        self._memory, self._rows = memory, rows

    def append(self, op: ops.RopeAppend, keys: Array, values: Array) -> None:
        self._memory.append(op.cache, keys, values)

    def attend(self, op: ops.Attend, queries: Array) -> Array:
        out = np.zeros((len(queries), queries[0].size), queries.dtype)
        kv_heads = self.step.caches[op.cache].kv_heads
        sinks = None if op.sinks is None else self.weights[op.sinks]
        for m in np.flatnonzero(self.positions >= 0).tolist():
            seen = (part[-(op.window or len(part)) :] for part in self._memory.seen(op.cache, m))
            keys, values = (part.swapaxes(0, 1) for part in seen)
            q = queries[m].reshape(kv_heads, -1, 1, queries.shape[-1])
            out[m] = attention(op, q, keys, values, sinks).reshape(-1)
        return out

    def before(self, op: ops.Conv, x: Array) -> Array:
        self._memory.append(op.cache, x[:, None])
        out = np.zeros((len(x), op.taps, x.shape[1]), x.dtype)
        for m in np.flatnonzero(self.positions >= 0).tolist():
            seen = self._memory.seen(op.cache, m)[0][-op.taps :, 0]
            out[m, op.taps - len(seen) :] = seen
        return out

    def choose(self, stack: str, expert: int, x: Array) -> None:
        """Nothing is learnt of the inputs of experts."""

    def recur(self, cache: int, update: Update) -> None:
        shape = self.step.caches[cache]
        for m in np.flatnonzero(self.positions >= 0).tolist():
            before = self._memory.state(cache, m)
            if before is None:
                before = np.zeros((shape.kv_heads, shape.depth, shape.head_dim), np.float32)
            self._memory.keep(cache, m, update(np.array([m]), before[None])[0])

    def wanted(self, x: Array) -> Array:
        return x if self._rows is None else x[self._rows]
