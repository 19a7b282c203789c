"""Llama and what computes like it (Mistral, with its sliding window; Qwen3, with norms of queries and keys): the step as an MLX graph."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from nearfar.edge_runtime.executors.mlx.cache import PagedCache
from nearfar.edge_runtime.executors.mlx.rope import Rope
from nearfar.edge_runtime.executors.mlx.rows import Array, Rows
from nearfar.edge_runtime.executors.mlx.weights import Linear, Matrix, Weights, join
from nearfar.format.manifest import Model


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, four matrices in place of seven."""

    input_norm: mx.array
    qkv: Linear
    o: Matrix
    post_norm: mx.array
    gate_up: Linear
    down: Matrix
    window: int | None
    qk_norms: tuple[mx.array, ...]
    """Weights of the norms of a query's and a key's head, where the model has them."""

    @property
    def arrays(self) -> list[mx.array]:
        """What it holds."""
        matrices = (self.qkv, self.o, self.gate_up, self.down)
        return [self.input_norm, self.post_norm, *self.qk_norms, *(array for matrix in matrices for array in matrix.arrays)]


class Llama:
    """Weights on the device, and the graph of a step over them."""

    def __init__(self, model: Model, weights: Weights, rope: Rope, compiled: bool) -> None:
        """`compiled`: fuse element-wise operations. On a CPU that needs a C++ compiler and saves nothing (measured)."""
        self._model, self._rope = model, rope
        self._eps = float(weights.config["rms_norm_eps"])
        self._gate = mx.compile(_silu_gate, shapeless=True) if compiled else _silu_gate
        self._embed = weights.matrix("model.embed_tokens")
        self._norm = weights.vector("model.norm.weight")
        tied = "lm_head.weight" not in weights
        self._head = self._embed if tied else weights.matrix("lm_head")
        ends = [self._norm, *self._embed.arrays, *([] if tied else self._head.arrays)]
        mx.eval(ends)
        self._layers = []
        for index in range(model.layers):
            layer = _layer(weights, f"model.layers.{index}", model.window(index))
            mx.eval(layer.arrays)  # so that no more than one layer is there twice, joined and apart
            self._layers.append(layer)
        weights.finish()
        self.nbytes = sum(a.nbytes for a in ends) + sum(a.nbytes for layer in self._layers for a in layer.arrays)

    @property
    def windows(self) -> list[int | None]:
        """The kinds of attention that its layers have: a number of positions, or None for all."""
        return list(dict.fromkeys(layer.window for layer in self._layers))

    def step(self, tokens: mx.array, rows: Rows, cache: PagedCache, wanted: Array) -> mx.array:
        """Append the rows' keys and values to the cache; hidden states [len(wanted), hidden_size] of the wanted rows."""
        model = self._model
        x, turn = self._embed.rows(tokens), self._rope.turn(rows.positions)
        for index, layer in enumerate(self._layers):
            projected = layer.qkv(mx.fast.rms_norm(x, layer.input_norm, self._eps))
            heads = projected.reshape(len(rows), -1, model.head_dim)
            turned = turn(self._normed(layer, heads[:, : model.heads + model.kv_heads])).swapaxes(0, 1)
            values = heads[:, model.heads + model.kv_heads :].swapaxes(0, 1)
            cache.append(index, turned[model.heads :], values, rows.cells)
            parts = [
                cache.attend(index, turned[: model.heads, span.row : span.row + span.count], span, layer.window)
                for span in rows.spans
            ]
            attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
            if index == len(self._layers) - 1 and len(wanted) < len(rows):
                chosen = mx.array(wanted.astype(np.int32))  # past the last cache, only these rows matter
                x, attended = x[chosen], attended[chosen]
            x = x + layer.o(attended)
            inner = layer.gate_up(mx.fast.rms_norm(x, layer.post_norm, self._eps))
            half = inner.shape[-1] // 2
            x = x + layer.down(self._gate(inner[:, :half], inner[:, half:]))
        return mx.fast.rms_norm(x, self._norm, self._eps)

    def _normed(self, layer: Layer, heads: mx.array) -> mx.array:
        """Queries and keys [M, heads + kv_heads, head_dim], each head normalized where the model does that."""
        if not layer.qk_norms:
            return heads
        parts = zip(mx.split(heads, [self._model.heads], axis=1), layer.qk_norms, strict=True)
        return mx.concatenate([mx.fast.rms_norm(part, weight, self._eps) for part, weight in parts], axis=1)

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 [M, vocab_size] of hidden states [M, hidden_size]."""
        return self._head(hidden).astype(mx.float32)


def _layer(weights: Weights, name: str, window: int | None) -> Layer:
    return Layer(
        weights.vector(f"{name}.input_layernorm.weight"),
        join([weights.matrix(f"{name}.self_attn.{part}_proj") for part in "qkv"]),
        weights.matrix(f"{name}.self_attn.o_proj"),
        weights.vector(f"{name}.post_attention_layernorm.weight"),
        join([weights.matrix(f"{name}.mlp.{part}_proj") for part in ("gate", "up")]),
        weights.matrix(f"{name}.mlp.down_proj"),
        window,
        tuple(weights.vector(f"{name}.self_attn.{which}_norm.weight") for which in "qk")
        if f"{name}.self_attn.q_norm.weight" in weights
        else (),
    )


def _silu_gate(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up
