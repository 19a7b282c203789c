"""Tiny quantized checkpoints, written bit by bit in the layout of each format's own writer, and the expected
results of building them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nearfar.build.pipeline import BuildOptions, build
from nearfar.build.source import open_source
from nearfar.build.weights.quantize import dequantize
from nearfar.edge_runtime import Engine
from nearfar.kernels.buckets import Buckets
from tests.support import tiny
from tests.support.backends import greedy as greedy_tokens

Array = npt.NDArray[Any]
CONFIG: dict[str, Any] = {
    **tiny.CONFIG, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, ANSWER = (72, 101, 108, 108, 111), 12
SMALL = Buckets((1, 16), (1,))
NAMES = {
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bfloat16": "BF16", "float16": "F16",
    "float32": "F32", "int64": "I64", "int32": "I32", "uint32": "U32", "int8": "I8", "uint8": "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Integers:
    """A matrix as integers: `codes` and `zeros` from 0 on, w = scale · (code - zero) by groups of inputs."""

    codes: Array
    zeros: Array
    scales: Array

    def weights(self, groups: Array | None = None) -> Array:
        """The formula, input by input; `groups`: which group each input is of, by default in order."""
        k = self.codes.shape[1]
        of = np.arange(k) // (k // self.scales.shape[1]) if groups is None else groups
        scales, zeros = (a[:, of].astype(np.float64) for a in (self.scales, self.zeros))
        return np.asarray(scales * (self.codes - zeros), np.float32)


def weights(config: Mapping[str, Any] = CONFIG) -> dict[str, Array]:
    """Dequantize, input by input. `groups`: the group of each input, by default consecutive."""
    out = dict(tiny.weights(dict(config)))
    if not config["tie_word_embeddings"]:
        rng = np.random.default_rng(7)
        out["lm_head.weight"] = rng.normal(0, 0.3, out["model.embed_tokens.weight"].shape).astype(np.float32)
    return out


def linear(name: str) -> bool:
    """Whether such checkpoints quantize the tensor: they quantize the matrices in layers."""
    return "_proj" in name


def to_integers(
    weight: Array, bits: int, group: int, symmetric: bool = False, dtype: Any = np.float16
) -> Integers:
    """Quantize by rounding to the nearest code."""
    n, k = weight.shape
    wide = weight.reshape(n, k // group, group)
    low, high, top = wide.min(2), wide.max(2), 2**bits - 1
    if symmetric:
        scales = (np.maximum(-low, high) / (2 ** (bits - 1) - 0.5)).astype(dtype)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top).astype(dtype)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, top).astype(np.int64)
    steps = np.round(wide / scales[..., None].astype(np.float32)) + zeros[..., None]
    return Integers(np.clip(steps, 0, top).astype(np.int64).reshape(n, k), zeros, scales)


def pack_words(values: Array, bits: int, places: Iterable[int] | None = None) -> Array:
    """Pack values [rows, m] below 2^bits into int32 [rows, m · bits/32], one after the other from the lowest
    bit up. `places`: the order within each word.
    """
    rows, m = values.shape
    if places is not None:
        inside = list(places)
        values = values.reshape(rows, -1, len(inside))[:, :, inside].reshape(rows, m)
    stream = ((values[:, :, None] >> np.arange(bits)) & 1).reshape(rows, -1).astype(np.uint8)
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """Write a directory as transformers does."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_mlc(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """Write a directory as MLC LLM does: two files of tensors, float32 as bfloat16."""
    path.mkdir(parents=True)
    (path / "mlc-chat-config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    names = list(tensors)
    shards = []
    for index, part in enumerate((names[::2], names[1::2])):
        records: list[dict[str, Any]] = []
        data = b""
        for name in part:
            array = tensors[name]
            raw = array.astype(ml_dtypes.bfloat16 if array.dtype == np.float32 else array.dtype).tobytes()
            records.append({
                "name": name, "shape": list(array.shape), "dtype": array.dtype.name,
                "format": "f32-to-bf16", "nbytes": len(raw), "byteOffset": len(data),
            })  # fmt: skip
            data += raw
        file = f"params_shard_{index}.bin"
        (path / file).write_bytes(data)
        shards.append({"dataPath": file, "format": "raw-shard", "nbytes": len(data), "records": records})
    (path / "ndarray-cache.json").write_text(json.dumps({"metadata": {}, "records": shards}))
    return path


def read_back(path: Path, expected: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Our reader's results for the quantized matrices: as floats, and as codes for those that are carried
    over.
    """
    quantized = open_source(BuildOptions(str(path), path / "out")).quantized
    assert quantized is not None
    floats, carried = {}, {}
    for name, scheme in quantized.tensors.items():
        n = len(expected[name])
        cuts = [0, n // 3 + 1, n]  # the cuts are not multiples of a word
        pieces = list(itertools.pairwise(cuts))
        floats[name] = np.concatenate([quantized.weights(name, *piece) for piece in pieces])
        if scheme is not None:
            k = floats[name].shape[1]
            rows = [quantized.carry(name, *piece, scheme.scales).rows for piece in pieces]
            carried[name] = np.concatenate(
                [
                    dequantize(part.widened(part.bits, scheme.group_size, k), scheme.group_size)
                    for part in rows
                ]
            )
    return floats, carried


def answer(
    path: Path, out: Path, target: str = "cpu", precision: str | None = None, **options: Any
) -> tuple[list[int], dict[str, Any]]:
    """Build for a target and run; gives the greedy answer to PROMPT and the manifest."""
    made = BuildOptions(str(path), out, (target,), buckets=SMALL, cpu_features=("native",), **options)
    (root,) = build(made)
    with Engine.load(root, device=target, kv_memory="4MB", precision=precision) as engine:
        found = greedy_tokens(engine, PROMPT, ANSWER)
    return found, json.loads((root / "manifest.json").read_text())


def greedy(floats: Mapping[str, Array], config: Mapping[str, Any] = CONFIG) -> list[int]:
    """transformers' greedy answer with these weights in float32."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    state = {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in floats.items()}
    model.load_state_dict(state)
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(out[0, len(PROMPT) :].tolist())
