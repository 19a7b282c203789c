"""The model's step as a function in a file (`mx.export_function`), for apps without Python or model code.

    step(tokens, positions, rows, cached, k.0, v.0, k.1, v.1, …; weights by name)
        -> logits, cached', k.0', v.0', k.1', v.1', …

B sequences, L new tokens each, S cached ones, R rows of logits each; all four are free.
  tokens int32 [B, L]; positions int32 [B, L], −1: padding, which nobody attends to
  rows int32 [B, R]: for which of the L tokens logits are wanted
  cached int32 [B, S]: the positions of the cached tokens; S may be 0
  k.i, v.i [B, kv_heads, S, head_dim] in the model's dtype: keys and values of cache i (sizes: see metadata)
  logits float32 [B, R, vocab]; the cache comes back with S + L tokens

Attention goes by position: a token sees what lies at positions 0 … its own. So sequences of different lengths
need no mask: they are padded on either side, in any step.

The runtime's own interpreter walks the list of the step; this module replaces the paged cache, and reads
weights as the file has them. A function that is traced without shapes (`shapeless`) must not use a primitive
whose parameters hold a free size. In MLX 0.32 these primitives are Slice, Reshape to free sizes, and Gather
along any axis but the first (which keeps the traced sizes without an error). They are hidden in indexing with
integers or slices, mx.take, mx.fast.rope with an offset, mx.fast.scaled_dot_product_attention with a mask,
and mx.dequantize. This module uses take_along_axis, flatten, unflatten and products instead.

The file names the device that it runs on. A file that was written where MLX has no GPU runs on the CPU
everywhere; so write it on a Mac:

    python -m nearfar.build.targets.mlx_function ARTIFACT      # needs mlx, not TVM
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from nearfar.edge_runtime.executors.mlx import attention
from nearfar.edge_runtime.executors.mlx.calls import Arrays, Rule
from nearfar.edge_runtime.executors.mlx.elementwise import Elementwise
from nearfar.edge_runtime.executors.mlx.interpreter import Interpreter
from nearfar.edge_runtime.executors.mlx.stacks import Stack
from nearfar.edge_runtime.executors.mlx.weights import AFFINE, MlxMatrix
from nearfar.errors import BuildError
from nearfar.format.manifest import StepRecords
from nearfar.format.seal import seal
from nearfar.step.model import KvCache, Step
from nearfar.step.ops import Attend
from nearfar.step.params import Param, TensorPiece
from nearfar.step.rope import Rope

FUNCTION = "step.mlxfn"
Weights = Mapping[str, mx.array]


class RawMatrix:
    """A matrix for products, in the tensors that the file has; the resulting columns are put into the step's
    order.
    """

    def __init__(self, param: Param, weights: Weights) -> None:
        self._param, self.k = param, param.k
        self.widths = [piece.rows for piece in param.pieces]
        self._tensors = {}
        for tensor in param.tensors:
            base = tensor.removesuffix(".weight")
            parts = {"weight": tensor, **{part: f"{base}.{part}" for part in AFFINE}}
            self._tensors[tensor] = MlxMatrix.of(
                {p: weights[n] for p, n in parts.items() if n in weights}, param.k
            )

    def __call__(self, x: mx.array) -> Arrays:
        """See reading.MatrixWeights."""
        made = {tensor: matrix(x) for tensor, matrix in self._tensors.items()}
        return [_pick(piece, made[piece.tensor]) for piece in self._param.pieces]

    def rows(self, index: mx.array) -> mx.array:
        """Dequantize rows bit by bit, by products with powers of two: this works for any number of bits."""
        (matrix,) = self._tensors.values()
        rows = matrix.weight[index]
        if matrix.scales is None or matrix.biases is None:
            return rows
        dtype = matrix.scales.dtype
        bits = (mx.expand_dims(rows, -1) >> mx.arange(32, dtype=mx.uint32)) & mx.array(1, mx.uint32)
        codes = mx.unflatten(mx.flatten(bits, -2, -1), -1, (-1, matrix.group_size, matrix.bits)).astype(dtype)
        codes = mx.sum(codes * mx.array([2.0**bit for bit in range(matrix.bits)], dtype), axis=-1)
        scale, bias = (mx.expand_dims(part[index], -1) for part in (matrix.scales, matrix.biases))
        return mx.flatten(codes * scale + bias, -2, -1)


class RawWeights:
    """See reading.Weights: the arguments of the function, by the names of the file's tensors."""

    def __init__(self, params: Sequence[Param], weights: Weights) -> None:
        self._params, self._weights = {param.name: param for param in params}, weights

    def matrix(self, name: str) -> RawMatrix:
        """See reading.Weights."""
        return RawMatrix(self._params[name], self._weights)

    def stack(self, name: str) -> Stack:
        """See reading.Weights. The target has refused to export a model with experts."""
        raise AssertionError(f"{name}: a function has no experts")

    def vector(self, name: str, dtype: mx.Dtype) -> Arrays:
        """See reading.Weights."""
        param = self._params[name]
        parts = (
            piece.scale * _pick(piece, self._weights[piece.tensor]).astype(mx.float32)
            for piece in param.pieces
        )
        return tuple((param.offset + param.scale * part).astype(dtype) for part in parts)


def _pick(piece: TensorPiece, x: mx.array) -> mx.array:
    """Select a piece's columns from x, whose columns are the rows of the piece's tensor."""
    if piece.order is None or piece.order.trivial:
        return x if x.shape[-1] == piece.rows else columns(x, range(piece.start, piece.start + piece.rows))
    return columns(x, [piece.start + row for row in piece.order.rows(piece.rows)])


def columns(x: mx.array, index: Sequence[int] | range, axis: int = -1) -> mx.array:
    """Select columns of x along an axis, in any order, without a primitive that holds the other sizes."""
    others = tuple(at for at in range(x.ndim) if at != axis % x.ndim)
    return mx.take_along_axis(x, mx.expand_dims(mx.array(list(index)), others), axis=axis)


class FreeRun:
    """See calls.Run.

    Values are [B, L, width] or [B, L, heads, head_dim], caches [B, kv_heads, S, head_dim].
    """

    def __init__(self, step: Step, dtype: mx.Dtype, inputs: Sequence[mx.array]) -> None:
        """`inputs` come in the order of the module's docstring."""
        self._step, self._dtype = step, dtype
        self.tokens, self._positions, self._rows, cached, *self.cache = inputs
        self.cached = mx.concatenate([cached, self._positions], axis=1)
        self._angles: dict[str, tuple[mx.array, mx.array]] = {}
        self._masks: dict[int | None, mx.array] = {}

    def positions(self) -> mx.array:
        """See Run."""
        return mx.maximum(mx.expand_dims(self._positions, 2), 0).astype(mx.float32)

    def columns(self, x: mx.array, start: int, end: int) -> mx.array:
        """See Run."""
        return columns(x, range(start, end), axis=2)

    def rotate(self, rope: str, x: mx.array) -> mx.array:
        """See Run."""
        if rope not in self._angles:
            self._angles[rope] = self._tables(self._step.ropes[rope])
        straight, crossed = self._angles[rope]
        head_dim = x.shape[-1]
        order = [*range(head_dim // 2, head_dim), *range(head_dim // 2)]
        return x * straight + columns(x, order) * crossed

    def append(self, cache: int, keys: mx.array, values: mx.array) -> None:
        """See Run."""
        for index, new in ((2 * cache, keys), (2 * cache + 1, values)):
            self.cache[index] = mx.concatenate([self.cache[index], new.swapaxes(1, 2)], axis=2)

    def attend(self, op: Attend, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """See Run."""
        keys, values = (mx.expand_dims(part, 2) for part in self.cache[2 * op.cache : 2 * op.cache + 2])
        kv_heads = self._step.caches[op.cache].kv_heads
        shared = mx.unflatten(queries.swapaxes(1, 2) * op.scale, 1, (kv_heads, -1))
        scores = shared @ keys.swapaxes(-1, -2)
        if op.window not in self._masks:
            self._masks[op.window] = self._mask(op.window)
        sink = None if sinks is None else mx.expand_dims(mx.unflatten(sinks, 0, (kv_heads, -1)), (2, 3))
        out = attention.weights(scores, self._masks[op.window], op.softcap, sink) @ values
        return mx.flatten(mx.flatten(out, 1, 2).transpose(0, 2, 1, 3), -2, -1)

    def before(self, cache: int, taps: int, x: mx.array) -> mx.array:
        """See Run. The target has refused to export a model with convolutions."""
        raise AssertionError("a function keeps keys and values only")

    def recur(self, cache: int, parts: Arrays, rule: Rule) -> mx.array:
        """See Run. The target has refused to export a model with states."""
        raise AssertionError("a function keeps keys and values only")

    def choose(self, arrays: Arrays) -> list[mx.array]:
        """See Run."""
        self._positions = mx.take_along_axis(self._positions, self._rows, axis=1)
        self._angles, self._masks = {}, {}
        return [self._chosen(array) for array in arrays]

    def _chosen(self, x: mx.array) -> mx.array:
        index = mx.expand_dims(self._rows, tuple(range(2, x.ndim)))
        return mx.take_along_axis(x, index, axis=1)

    def _tables(self, rope: Rope) -> tuple[mx.array, mx.array]:
        """The cosines and the sines, [B, L, 1, head_dim]; a sine has the sign for the half that it
        multiplies.
        """
        scale = mx.array([rope.scale if freq else 1.0 for freq in rope.inv_freq], mx.float32)
        angle = mx.expand_dims(self.positions(), 2) * mx.array(rope.inv_freq, mx.float32)
        cos, sin = mx.cos(angle) * scale, mx.sin(angle) * scale
        pair = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
        return pair[0].astype(self._dtype), pair[1].astype(self._dtype)

    def _mask(self, window: int | None) -> mx.array:
        """The mask of the cached tokens that each new token sees: bool [B, 1, 1, L, S + L]."""
        own, other = mx.expand_dims(self._positions, 2), mx.expand_dims(self.cached, 1)
        seen = (other >= 0) & (other <= own)
        if window is not None:
            seen = seen & (own - other < window)
        return mx.expand_dims(seen, (1, 2))


def export_step(file: Path, step: Step, vocab_size: int, weights: Weights) -> None:
    """Write the function; the weights stay outside, and need not be in memory."""
    names = list(weights)
    unread = set(names)
    dtype = mx.float32 if any(array.dtype == mx.float32 for array in weights.values()) else mx.float16

    def function(*args: mx.array, **kwargs: mx.array) -> list[mx.array]:
        read = _Read(kwargs)
        model = Interpreter(
            step.ops, step.caches, RawWeights(step.params, read), Elementwise(dtype, compiled=False)
        )
        run = FreeRun(step, dtype, args)
        logits = model.logits(model.step(run))
        unread.difference_update(read.names)
        return [logits, run.cached, *run.cache]

    ints = [
        mx.zeros((2, 3), mx.int32),
        mx.zeros((2, 3), mx.int32),
        mx.zeros((2, 1), mx.int32),
        mx.zeros((2, 5), mx.int32),
    ]
    caches = [mx.zeros((2, cache.kv_heads, 5, cache.head_dim), dtype) for cache in step.caches for _ in "kv"]
    about = {
        "format": "nearfar-step", "version": 2, "vocab_size": vocab_size,
        "dtype": str(dtype).removeprefix("mlx.core."),
        "caches": [{"kv_heads": cache.kv_heads, "head_dim": cache.head_dim} for cache in step.caches],
        "device": str(mx.default_device()), "inputs": ["tokens", "positions", "rows", "cached", "k.i", "v.i"],
        "outputs": ["logits", "cached", "k.i", "v.i"], "weights": sorted(names),
    }  # fmt: skip
    mx.export_function(
        str(file),
        function,
        *ints,
        *caches,
        shapeless=True,
        metadata=json.dumps(about, sort_keys=True),
        **weights,
    )
    if unread:
        raise BuildError(
            f"the exported function would leave out {', '.join(sorted(unread)[:8])}, which the model "
            "computes with: build without --export-function"
        )


class _Read(dict[str, mx.array]):
    """Weights that remember which of them were used."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> mx.array:
        self.names.add(name)
        return super().__getitem__(name)


def load_weights(files: Sequence[Path]) -> dict[str, mx.array]:
    """The tensors of safetensors files, read when they are used."""
    weights: dict[str, mx.array] = {}
    for file in files:
        tensors: Any = mx.load(str(file))
        weights |= tensors
    return weights


def main() -> None:
    """Write the function of an artifact again, for this machine's device, and note it in the manifest."""
    parser = argparse.ArgumentParser(
        prog="python -m nearfar.build.targets.mlx_function", description=main.__doc__
    )
    parser.add_argument("artifact", type=Path, help="a directory that `nearfar build --target mlx` wrote")
    root = parser.parse_args().artifact
    manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    files = [root / shard["file"] for shard in manifest["weights"]["shards"]]
    export_step(root / FUNCTION, _step(manifest), manifest["model"]["vocab_size"], load_weights(files))
    data = (root / FUNCTION).read_bytes()
    manifest["function"] = {"file": FUNCTION, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (root / "manifest.json").write_bytes(seal(manifest).encode())
    print(f"wrote {root / FUNCTION} for {mx.default_device()}")


def _step(manifest: Mapping[str, Any]) -> Step:
    """Read the step from a manifest."""
    windows = [group.get("window") for group in manifest["groups"]]
    caches = (KvCache(c["kv_heads"], c["head_dim"], windows[c["group"]]) for c in manifest["caches"])
    ropes = {name: Rope(tuple(rope["inv_freq"]), rope["scale"]) for name, rope in manifest["ropes"].items()}
    records = StepRecords(tuple(manifest["step"]["ops"]), tuple(manifest["step"]["params"]))
    return Step(records.operations, records.parameters, tuple(caches), ropes)


if __name__ == "__main__":
    main()
