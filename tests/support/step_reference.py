"""The list of a step, read in NumPy: one function for each operation, for reading and not for speed.

Every other reader is compared with it, and it with transformers (tests/unit/test_models.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nearfar.build.calibration.arithmetic import ACTIVATIONS, capped, linear, rms_norm, rotate
from nearfar.step import ops
from nearfar.step.model import Model
from nearfar.step.params import Param
from nearfar.step.reading import read_model

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]


class Memory(Protocol):
    """Where keys and values lie between steps."""

    def append(self, cache: int, keys: Array, values: Array) -> None:
        """Keep those of the step's rows: [M, kv_heads, head_dim]."""
        ...

    def seen(self, cache: int, row: int) -> tuple[Array, Array]:
        """What was kept of the row's sequence, up to its position: [positions, kv_heads, head_dim]."""
        ...


class Sequence:
    """The memory of one sequence, whose rows come in any order."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, tuple[Array, Array]]] = {}
        self.positions: Array = np.zeros(0, np.int64)

    def append(self, cache: int, keys: Array, values: Array) -> None:
        kept = self._kept.setdefault(cache, {})
        for m, position in enumerate(self.positions.tolist()):
            kept[position] = keys[m], values[m]

    def seen(self, cache: int, row: int) -> tuple[Array, Array]:
        pairs = [self._kept[cache][position] for position in range(self.positions[row] + 1)]
        return np.stack([k for k, _ in pairs]), np.stack([v for _, v in pairs])


def load_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Config and float32 tensors of a checkpoint directory."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return config, {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}


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
        """A step: float [rows, vocab] of the rows asked for, None: of all; those at −1 are padding."""
        out = np.zeros(0)
        self.values = values = {}
        for op in self.step.ops:
            values[op.out] = out = self._apply(op, values, tokens, positions, memory, logit_rows)
        return out

    def _weight(self, param: Param, tensors: Tensors) -> Array:
        """Pieces stacked, their rows in order, as offset + scale · what they hold."""
        parts = []
        for piece in param.pieces:
            part = tensors[piece.tensor][piece.start : piece.start + piece.rows].astype(self.dtype)
            parts.append(part if piece.order is None else part[piece.order.rows(piece.rows)])
        stacked = np.concatenate(parts)
        return stacked * self.dtype.type(param.scale) + self.dtype.type(param.offset)

    def _apply(
        self,
        op: ops.Op,
        values: dict[str, Array],
        tokens: Array,
        positions: Array,
        memory: Memory,
        rows: Array | None,
    ) -> Array:
        w, real = self.weights, self.dtype.type
        match op:
            case ops.Embed():
                return w[op.table][tokens] * real(op.scale)
            case ops.Norm():
                x = values[op.x]
                return rms_norm(x.reshape(len(x), op.groups, -1), w[op.weight], op.eps).reshape(x.shape)
            case ops.Linear():
                return linear(values[op.x], w[op.weight], w.get(op.bias or ""))
            case ops.RopeAppend():
                return self._rope_append(op, values[op.x], positions, memory)
            case ops.Attend():
                return self._attend(op, values[op.x], positions, memory)
            case ops.Glu():
                gate, up = np.split(values[op.x], 2, -1)
                return ACTIVATIONS[op.activation](gate) * up
            case ops.Act():
                return ACTIVATIONS[op.activation](values[op.x])
            case ops.Add():
                return (values[op.a] + values[op.b]) * real(op.scale)
            case ops.Mul():
                return values[op.a] * values[op.b]
            case ops.Scale():
                return values[op.x] * w[op.weight]
            case ops.Columns():
                return values[op.x][:, op.start : op.start + op.count]
            case ops.Embedding():
                return values[op.x] if rows is None else values[op.x][rows]
            case ops.Logits():
                x = values[op.x] if rows is None else values[op.x][rows]
                return capped(linear(x, w[op.weight], w.get(op.bias or "")), op.softcap)

    def _rope_append(self, op: ops.RopeAppend, x: Array, positions: Array, memory: Memory) -> Array:
        cache = self.step.caches[op.cache]
        widths = op.heads * cache.head_dim, cache.kv_heads * cache.head_dim
        rope = self.step.ropes[op.rope] if op.rope is not None else None

        def turned(part: Array, norm: str | None) -> Array:
            """[M, heads · head_dim] → [M, heads, head_dim], normalized and rotated."""
            heads = part.reshape(len(part), -1, cache.head_dim)
            if norm is not None and not op.norm_after:
                heads = self._normed(op, heads, norm)
            if rope is not None:
                heads = rotate(heads, rope, positions)
            return self._normed(op, heads, norm) if norm is not None and op.norm_after else heads

        q = turned(x[:, : widths[0]], op.q_norm)
        if op.q_scale is not None:
            beta, original = op.q_scale
            q = q * (1 + beta * np.log1p(np.maximum(positions, 0) // original)).astype(q.dtype)[:, None, None]
        if op.append:
            k = turned(x[:, widths[0] : sum(widths)], op.k_norm)
            v = x[:, sum(widths) :].reshape(len(x), -1, cache.head_dim)
            ones = np.ones(cache.head_dim, self.dtype)
            memory.append(op.cache, k, v if op.v_norm is None else rms_norm(v, ones, op.v_norm))
        return q.reshape(len(x), -1)

    def _normed(self, op: ops.RopeAppend, heads: Array, norm: str) -> Array:
        flat = heads.reshape(len(heads), -1) if op.norm_all else heads
        return rms_norm(flat, self.weights[norm], op.eps).reshape(heads.shape)

    def _attend(self, op: ops.Attend, x: Array, positions: Array, memory: Memory) -> Array:
        cache = self.step.caches[op.cache]
        out = np.zeros_like(x)
        for m in np.flatnonzero(positions >= 0).tolist():
            keys, values = (part[-(op.window or len(part)) :] for part in memory.seen(op.cache, m))
            q = x[m].reshape(cache.kv_heads, -1, cache.head_dim)
            scores = capped(np.einsum("hqd,phd->hqp", q, keys) * self.dtype.type(op.scale), op.softcap)
            if op.sinks is not None:
                sinks = self.weights[op.sinks].reshape(cache.kv_heads, -1, 1)
                scores = np.concatenate([scores, sinks], -1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = (weights / weights.sum(-1, keepdims=True))[..., : len(values)]
            out[m] = np.einsum("hqp,phd->hqd", weights, values).reshape(-1)
        return out
