"""The reference executor: docs/artifact.md in NumPy float32, straight from a Hugging Face llama checkpoint.

Written for reading, not for speed. Real executors are compared with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Weights = dict[str, Array]


def load_checkpoint(path: Path) -> tuple[dict[str, Any], Weights]:
    """Config and float32 weights of a checkpoint directory."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((path / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return config, {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}


def groups_of(config: dict[str, Any]) -> tuple[list[int | None], list[int]]:
    """The window of each group, none first, then the widest; and the group of each layer."""
    layers, sliding = config["num_hidden_layers"], config.get("sliding_window")
    types = config.get("layer_types") or ["sliding_attention" if sliding else "full_attention"] * layers
    of_layer = [sliding if kind == "sliding_attention" else None for kind in types]
    windows = sorted(set(of_layer), key=lambda window: (window is not None, -(window or 0)))
    return windows, [windows.index(window) for window in of_layer]


class NumpyExecutor:
    """Runs step, greedy, sample and logprobs over named buffers, as an executor does; everything happens in `run`."""

    name = "numpy"
    precision = "f32"

    def __init__(
        self, config: dict[str, Any], weights: Weights, *, pages: int | Sequence[int], page_size: int = 16, slots: int = 16
    ) -> None:
        self.config, self.weights, self.page_size = config, weights, page_size
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.vocab, context = config["vocab_size"], config["max_position_embeddings"]
        self.windows, self.groups = groups_of(config)
        counts = [pages] * len(self.windows) if isinstance(pages, int) else pages
        shapes = [(counts[group], self.kv_heads, page_size, self.head_dim) for group in self.groups]
        self.kv = [(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for shape in shapes]
        self.rope = rope_table(config, self.head_dim, context)
        self.buffers: dict[str, Array] = {
            "tokens": np.zeros(256, np.int32), "positions": np.zeros(256, np.int32), "slots": np.zeros(256, np.int32),
            "logit_rows": np.zeros(16, np.int32),
            "logits": np.zeros((16, self.vocab), np.float32), "sampled": np.zeros(16, np.int32),
            "sample_f32": np.zeros((16, 8), np.float32), "sample_i32": np.zeros((16, 8), np.int32),
            "logit_bias": np.zeros((slots, self.vocab), np.float32), "counts": np.zeros((slots, self.vocab), np.int32),
            "allowed": np.zeros((slots, (self.vocab + 31) // 32), np.uint32),
            "logprob": np.zeros(16, np.float32), "top_ids": np.zeros((16, 20), np.int32),
            "top_logprobs": np.zeros((16, 20), np.float32),
        }  # fmt: skip
        for group in range(len(self.windows)):
            self.buffers[f"page_table.{group}"] = np.full((slots, -(-context // page_size)), -1, np.int32)
        self.steps: list[int] = []
        self.closed = False

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        target = self.buffers[buffer]
        assert target.dtype == data.dtype, (buffer, data.dtype)
        if data.shape[1:] == target.shape[1:]:
            target[row : row + len(data)] = data
        else:
            assert len(data) == 1 and column + data.shape[1] <= target.shape[1], (buffer, data.shape)  # noqa: PT018
            target[row, column : column + data.shape[1]] = data[0]

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        snapshot = self.buffers[buffer][:rows].copy()
        return lambda: snapshot

    def caches(self, group: int) -> dict[str, Array]:
        """Keys and values of a group by name; a cache for each layer."""
        layers = [layer for layer in range(self.layers) if self.groups[layer] == group]
        return {f"kv.{layer}.{part}": cache for layer in layers for part, cache in zip("kv", self.kv[layer], strict=True)}

    def copy_page(self, group: int, source: int, target: int) -> None:
        for cache in self.caches(group).values():
            cache[target] = cache[source]

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        return {name: cache[list(pages)] for name, cache in self.caches(group).items()}

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        assert content.keys() == self.caches(group).keys()
        for name, cache in self.caches(group).items():
            assert content[name].shape == (len(pages), *cache.shape[1:])
            assert content[name].dtype == cache.dtype
            cache[list(pages)] = content[name]

    def memory_used(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.kv)

    def close(self) -> None:
        self.closed = True

    def run(self, function: str, size: int) -> None:
        getattr(self, f"_{function}")(size)

    def _step(self, size: int) -> None:
        self.steps.append(size)
        b, w, eps = self.buffers, self.weights, self.config["rms_norm_eps"]
        positions = b["positions"][:size]
        live = positions >= 0
        x = w["model.embed_tokens.weight"][b["tokens"][:size]]
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            h = _norm(x, w[p + "input_layernorm.weight"], eps)
            q, k, v = (_linear(h, w, f"{p}self_attn.{n}_proj").reshape(size, -1, self.head_dim) for n in "qkv")
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            x = x + _linear(self._attend(layer, q, k, v, live), w, p + "self_attn.o_proj")
            h = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = _linear(h, w, p + "mlp.gate_proj"), _linear(h, w, p + "mlp.up_proj")
            x = x + _linear(gate / (1 + np.exp(-gate)) * up, w, p + "mlp.down_proj")
        rows = min(size, 16)
        x = _norm(x[b["logit_rows"][:rows]], w["model.norm.weight"], eps)
        head = w["model.embed_tokens.weight"] if self.config.get("tie_word_embeddings") else w["lm_head.weight"]
        b["logits"][:rows] = x @ head.T

    def _rotate(self, x: Array, positions: Array) -> Array:
        half = self.head_dim // 2
        table = self.rope[np.maximum(positions, 0)][:, None]
        cos, sin, a, b = table[..., :half], table[..., half:], x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, layer: int, q: Array, k: Array, v: Array, live: Array) -> Array:
        b, (kc, vc), size = self.buffers, self.kv[layer], self.page_size
        table, window = b[f"page_table.{self.groups[layer]}"], self.windows[self.groups[layer]]
        positions, slots = b["positions"], b["slots"]
        for m in np.flatnonzero(live):
            page = table[slots[m], positions[m] // size]
            assert page >= 0, "a row has no page"
            kc[page, :, positions[m] % size], vc[page, :, positions[m] % size] = k[m], v[m]
        out = np.zeros_like(q)
        for m in np.flatnonzero(live):
            n = positions[m] + 1
            first = 0 if window is None else max(n - window, 0)
            pages = table[slots[m], first // size : -(-n // size)]
            assert (pages >= 0).all(), "a row reads what has no page"
            read = slice(first % size, n - first // size * size)
            keys, values = (c[pages].transpose(1, 0, 2, 3).reshape(self.kv_heads, -1, self.head_dim)[:, read]
                            for c in (kc, vc))  # fmt: skip
            heads = q[m].reshape(self.kv_heads, -1, self.head_dim)
            scores = heads @ keys.transpose(0, 2, 1) / np.float32(math.sqrt(self.head_dim))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[m] = (weights / weights.sum(-1, keepdims=True) @ values).reshape(-1, self.head_dim)
        return out.reshape(len(q), -1)

    def _take(self, row: int, token: int) -> None:
        self.buffers["sampled"][row] = token
        feed = self.buffers["sample_i32"][row, 5]
        if feed >= 0:
            self.buffers["tokens"][feed] = max(token, 0)

    def _greedy(self, rows: int) -> None:
        for row in np.flatnonzero(self.buffers["sample_i32"][:rows, 0] >= 0).tolist():
            self._take(row, best_finite(self.buffers["logits"][row]))

    def _sample(self, rows: int) -> None:
        b = self.buffers
        for row in range(rows):
            slot = b["sample_i32"][row, 0]
            if slot >= 0:
                token = sample_row(b["logits"][row], b["logit_bias"][slot], b["allowed"][slot], b["counts"][slot],
                                   b["sample_f32"][row], b["sample_i32"][row])  # fmt: skip
                if token >= 0:
                    b["counts"][slot, token] += 1
                self._take(row, token)

    def _logprobs(self, rows: int) -> None:
        b = self.buffers
        for row in range(rows):
            logits = b["logits"][row].astype(np.float64)
            values = logits - logits.max()
            values = (values - np.log(np.exp(values).sum())).astype(np.float32)
            order = np.argsort(-values, kind="stable")[:20]
            b["logprob"][row] = values[max(b["sampled"][row], 0)]
            b["top_ids"][row, : len(order)], b["top_logprobs"][row, : len(order)] = order, values[order]


def best_finite(score: Array) -> int:
    """The lowest index of the largest finite value; -1 where there is none."""
    known = np.where(np.isfinite(score), score, -np.inf)
    best = int(np.argmax(known))
    return best if known[best] > -np.inf else -1


def sample_row(logits: Array, bias: Array, allowed: Array, counts: Array, floats: Array, ints: Array) -> int:
    """Steps 1 to 9 of "sample" in docs/artifact.md for one row."""
    temperature, top_p, min_p, repetition, presence, frequency = (np.float32(f) for f in floats[:6])
    top_k, seed_low, seed_high, counter = (int(i) for i in ints[1:5])
    tokens = np.arange(len(logits), dtype=np.uint32)
    score = logits + bias
    score[(allowed[tokens // 32] >> (tokens % 32)) & 1 == 0] = -np.inf
    seen, generated = counts != 0, (counts & 0xFFFFFF).astype(np.float32)
    score = np.where(seen, np.where(score > 0, score / repetition, score * repetition), score)
    score = score - frequency * generated - presence * (generated > 0)
    if temperature == 0 or best_finite(score) < 0:
        return best_finite(score)
    score = np.where(np.isfinite(score), score, -np.inf) / temperature
    kept = np.isfinite(score)
    if 0 < top_k < len(score):
        kept &= score >= np.sort(score)[-top_k]
    top = score.max()
    if top_p < 1:
        values = np.sort(score[kept])[::-1]
        mass = np.cumsum(np.exp(values - top), dtype=np.float64)
        kept &= score >= values[int(np.argmax(mass >= top_p * mass[-1]))]
    if min_p > 0:
        kept &= score - top >= np.log(min_p)
    noise = gumbel(seed_low & 0xFFFFFFFF, seed_high & 0xFFFFFFFF, counter, tokens)
    return int(np.argmax(np.where(kept, score + noise, -np.inf)))


def gumbel(seed_low: int, seed_high: int, counter: int, tokens: Array) -> Array:
    """The noise of each token: pcg4d of (seed, counter, token)."""
    v = [np.full_like(tokens, word) for word in (seed_low, seed_high, counter)] + [tokens.copy()]
    v = [word * np.uint32(1664525) + np.uint32(1013904223) for word in v]
    for last in (False, True):
        v[0] += v[1] * v[3]
        v[1] += v[2] * v[0]
        v[2] += v[0] * v[1]
        v[3] += v[1] * v[2]
        if not last:
            v = [word ^ (word >> np.uint32(16)) for word in v]
    u = np.minimum(((v[0] >> np.uint32(8)) + 0.5) * 2.0**-24, 1 - 2.0**-24)
    return (-np.log(-np.log(u))).astype(np.float32)


def rope_table(config: dict[str, Any], head_dim: int, context: int) -> Array:
    """The `rope` buffer for unscaled rope."""
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    inv_freq = (1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)).astype(np.float32).astype(np.float64)
    angles = np.arange(context)[:, None] * inv_freq
    return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * weight


def _linear(x: Array, weights: Weights, name: str) -> Array:
    out = x @ weights[name + ".weight"].T
    return out + weights[name + ".bias"] if name + ".bias" in weights else out
