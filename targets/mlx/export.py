"""The model's step as a function in a file (`mx.export_function`), for apps without Python or model code.

    step(tokens, positions, rows, cached, k.0, v.0, k.1, v.1, …; weights by name)
        -> logits, cached', k.0', v.0', k.1', v.1', …

B sequences, L new tokens each, S cached ones, R rows of logits each; all four are free.
  tokens int32 [B, L]; positions int32 [B, L], −1: padding, which nobody attends to
  rows int32 [B, R]: for which of the L tokens logits are wanted
  cached int32 [B, S]: the positions of the cached tokens; S may be 0
  k.i, v.i [B, kv_heads, S, head_dim] in the model's dtype
  logits float32 [B, R, vocab]; the cache comes back with S + L tokens

Attention goes by position: a token sees what lies at positions 0 … its own. So sequences of different lengths need no
mask: they are padded on either side, in any step.

A function that is traced without shapes (`shapeless`) may use no primitive whose parameters hold a size that is free.
In MLX 0.32 these are Slice, Reshape to such sizes, Gather along any axis but the first (which keeps the traced sizes and says
nothing), and what they are hidden in: indexing with integers or slices, mx.take, mx.fast.rope with an offset,
mx.fast.scaled_dot_product_attention with a mask, mx.dequantize. What is used here instead: take_along_axis, flatten and
unflatten, products.

The file names the device that it runs on. Written where MLX has no GPU, it runs on the CPU everywhere; so write it on a Mac:

    python -m nearfar.targets.mlx.export ARTIFACT      # needs mlx, not TVM
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from nearfar.errors import BuildError
from nearfar.format.seal import seal

FUNCTION = "step.mlxfn"
Weights = Mapping[str, mx.array]


@dataclass(frozen=True)
class StepShape:
    """What the graph needs to know besides the weights. `windows`: by layer, None where it attends to everything."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    tied: bool
    bits: int
    group_size: int
    inv_freq: tuple[float, ...]
    windows: tuple[int | None, ...]

    @staticmethod
    def of(config: Mapping[str, Any], model: Mapping[str, Any], inv_freq: Sequence[float]) -> StepShape:
        """From config.json, the manifest's `model`, and its rope frequencies."""
        quantization = config.get("quantization") or {"bits": 0, "group_size": 0}
        types = model.get("layer_types") or ["full_attention"] * model["layers"]
        return StepShape(
            layers=model["layers"],
            heads=model["heads"],
            kv_heads=model["kv_heads"],
            head_dim=model["head_dim"],
            vocab_size=model["vocab_size"],
            eps=config["rms_norm_eps"],
            tied=config["tie_word_embeddings"],
            bits=quantization["bits"],
            group_size=quantization["group_size"],
            inv_freq=tuple(inv_freq),
            windows=tuple(model["sliding_window"] if kind == "sliding_attention" else None for kind in types),
        )


class Step:
    """One step over named weights; see the module's docstring."""

    def __init__(self, shape: StepShape, weights: Weights) -> None:
        self._shape, self._weights = shape, weights
        self._dtype = weights["model.norm.weight"].dtype

    def __call__(
        self, tokens: mx.array, positions: mx.array, rows: mx.array, cached: mx.array, *cache: mx.array
    ) -> list[mx.array]:
        """The outputs, in the order of the module's docstring."""
        x = self._embed(tokens)
        cached = mx.concatenate([cached, positions], axis=1)
        masks = {window: self._mask(positions, cached, window) for window in set(self._shape.windows)}
        angles = self._angles(positions)
        new: list[mx.array] = []
        for i in range(self._shape.layers):
            layer = f"model.layers.{i}"
            normed = self._norm(x, f"{layer}.input_layernorm")
            attended, keys, values = self._attend(
                normed, f"{layer}.self_attn", angles, masks[self._shape.windows[i]], cache[2 * i : 2 * i + 2]
            )
            x = x + attended
            x = x + self._mlp(self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
            new += [keys, values]
        x = mx.take_along_axis(x, mx.expand_dims(rows, -1), axis=1)
        head = "model.embed_tokens" if self._shape.tied else "lm_head"
        logits = self._linear(self._norm(x, "model.norm"), head)
        return [logits.astype(mx.float32), cached, *new]

    def _attend(
        self, x: mx.array, name: str, angles: tuple[mx.array, mx.array], mask: mx.array, cache: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Attention over the cache and the new tokens; output, keys and values [B, kv_heads, S + L, head_dim]."""
        shape = self._shape
        q, k, v = (self._heads(x, f"{name}.{part}_proj", n) for part, n in
                   (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)))  # fmt: skip
        if f"{name}.q_norm.weight" in self._weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        keys = mx.concatenate([cache[0], _rotate(k, angles)], axis=2)
        values = mx.concatenate([cache[1], v], axis=2)
        q = mx.unflatten(_rotate(q, angles) * shape.head_dim**-0.5, 1, (shape.kv_heads, shape.heads // shape.kv_heads))
        scores = q @ mx.expand_dims(keys, 2).swapaxes(-1, -2)
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        out = mx.softmax(scores, axis=-1, precise=True) @ mx.expand_dims(values, 2)
        out = mx.flatten(mx.flatten(out, 1, 2).transpose(0, 2, 1, 3), -2, -1)
        return self._linear(out, f"{name}.o_proj"), keys, values

    def _mlp(self, x: mx.array, name: str) -> mx.array:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(gate * mx.sigmoid(gate) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _heads(self, x: mx.array, name: str, heads: int) -> mx.array:
        return mx.unflatten(self._linear(x, name), -1, (heads, self._shape.head_dim)).transpose(0, 2, 1, 3)

    def _norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self._weights[f"{name}.weight"], self._shape.eps)

    def _linear(self, x: mx.array, name: str) -> mx.array:
        weight, shape = self._weights[f"{name}.weight"], self._shape
        scales = self._weights.get(f"{name}.scales")
        if scales is None:
            out = x @ weight.T
        else:
            biases = self._weights[f"{name}.biases"]
            out = mx.quantized_matmul(
                x, weight, scales, biases, transpose=True, group_size=shape.group_size, bits=shape.bits
            )
        bias = self._weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _embed(self, tokens: mx.array) -> mx.array:
        """Rows of the embedding, dequantized bit by bit: a product with powers of two, at any number of bits."""
        name, shape = "model.embed_tokens", self._shape
        rows = self._weights[f"{name}.weight"][tokens]
        scales = self._weights.get(f"{name}.scales")
        if scales is None:
            return rows
        bits = (mx.expand_dims(rows, -1) >> mx.arange(32, dtype=mx.uint32)) & mx.array(1, mx.uint32)
        codes = mx.unflatten(mx.flatten(bits, -2, -1), -1, (-1, shape.group_size, shape.bits)).astype(self._dtype)
        codes = mx.sum(codes * mx.array([2.0**bit for bit in range(shape.bits)], self._dtype), axis=-1)
        scale, bias = scales[tokens], self._weights[f"{name}.biases"][tokens]
        return mx.flatten(codes * mx.expand_dims(scale, -1) + mx.expand_dims(bias, -1), -2, -1).astype(self._dtype)

    def _angles(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Cosines [B, 1, L, head_dim], and sines with the sign that the half they multiply needs."""
        angle = mx.expand_dims(positions, (1, 3)).astype(mx.float32) * mx.array(self._shape.inv_freq, mx.float32)
        cos, sin = mx.cos(angle), mx.sin(angle)
        pair = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
        return pair[0].astype(self._dtype), pair[1].astype(self._dtype)

    def _mask(self, positions: mx.array, cached: mx.array, window: int | None) -> mx.array:
        """Which cached tokens each new one sees: bool [B, 1, 1, L, S + L]."""
        own, other = mx.expand_dims(positions, 2), mx.expand_dims(cached, 1)
        seen = (other >= 0) & (other <= own)
        if window is not None:
            seen = seen & (own - other < window)
        return mx.expand_dims(seen, (1, 2))


def _rotate(x: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
    """Rotate the pairs (i, i + head_dim/2) of x [B, heads, L, head_dim]."""
    half = x.shape[-1] // 2
    other = mx.array([*range(half, 2 * half), *range(half)])
    swapped = mx.take_along_axis(x, mx.expand_dims(other, (0, 1, 2)), axis=-1)
    return x * angles[0] + swapped * angles[1]


def export_step(file: Path, shape: StepShape, weights: Weights) -> None:
    """Write the function; the weights stay outside, and need not be in memory."""
    names = list(weights)
    unread = set(names)

    def step(*args: mx.array, **kwargs: mx.array) -> list[mx.array]:
        read = _Read(kwargs)
        out = Step(shape, read)(*args)
        unread.difference_update(read.names)
        return out

    ints = [mx.zeros((2, 3), mx.int32), mx.zeros((2, 3), mx.int32), mx.zeros((2, 1), mx.int32), mx.zeros((2, 5), mx.int32)]
    dtype = weights["model.norm.weight"].dtype
    page = mx.zeros((2, shape.kv_heads, 5, shape.head_dim), dtype)
    about = {
        "format": "nearfar-step", "version": 1, "layers": shape.layers, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "vocab_size": shape.vocab_size, "dtype": str(dtype).removeprefix("mlx.core."),
        "device": str(mx.default_device()), "inputs": ["tokens", "positions", "rows", "cached", "k.i", "v.i"],
        "outputs": ["logits", "cached", "k.i", "v.i"], "weights": sorted(names),
    }  # fmt: skip
    caches = [page] * (2 * shape.layers)
    mx.export_function(
        str(file), step, *ints, *caches, shapeless=True, metadata=json.dumps(about, sort_keys=True), **weights
    )
    if unread:
        raise BuildError(
            f"the exported function would leave out {', '.join(sorted(unread)[:8])}, which the model computes with: build "
            "without --export-function"
        )


class _Read(dict[str, mx.array]):
    """Weights that remember which of them were used."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> mx.array:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a mapping's."""
        try:
            return self[name]
        except KeyError:
            return default


def load_weights(files: Sequence[Path]) -> dict[str, mx.array]:
    """The tensors of safetensors files, read when they are used."""
    weights: dict[str, mx.array] = {}
    for file in files:
        tensors: Any = mx.load(str(file))
        weights |= tensors
    return weights


def main() -> None:
    """Write the function of an artifact again, for this machine's device, and note it in the manifest."""
    parser = argparse.ArgumentParser(prog="python -m nearfar.targets.mlx.export", description=main.__doc__)
    parser.add_argument("artifact", type=Path, help="a directory that `nearfar build --target mlx` wrote")
    root = parser.parse_args().artifact
    manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    files = [root / shard["file"] for shard in manifest["weights"]["shards"]]
    shape = StepShape.of(config, manifest["model"], manifest["rope"]["inv_freq"])
    export_step(root / FUNCTION, shape, load_weights(files))
    data = (root / FUNCTION).read_bytes()
    manifest["function"] = {"file": FUNCTION, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (root / "manifest.json").write_bytes(seal(manifest).encode())
    print(f"wrote {root / FUNCTION} for {mx.default_device()}")


if __name__ == "__main__":
    main()
