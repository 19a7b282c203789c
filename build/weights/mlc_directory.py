"""Directories of MLC LLM (`mlc_llm convert_weight`) as checkpoints under Hugging Face's names.

`ndarray-cache.json` (`tensor-cache.json` in newer ones) lists files `params_shard_<i>.bin` and the tensors in
them: name, shape, dtype, byte offset and length; where `format` is f32-to-bf16, float32 may be kept as
bfloat16, which the length tells. `mlc-chat-config.json` has the model's config. MLC stacks the rows of q, k
and v, and of gate and up; rows are contiguous, so each part becomes a tensor of its own here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nearfar.build.weights.checkpoint import DirectoryCheckpoint, check_tokenizer, read_json
from nearfar.build.weights.headers import TensorEntry
from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader, show

LISTS = ("ndarray-cache.json", "tensor-cache.json")
CONFIG = "mlc-chat-config.json"
MLC_FILES = (*LISTS, CONFIG, "params_shard_*.bin")
DTYPES = {name: np.dtype(name) for name in ("uint32", "float16", "float32")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose tensors are named and stacked as `_parts` expects."""
PLAIN = ("q0f16", "q0bf16", "q0f32")
OF_THE_RUNTIME = (
    "context_window_size", "prefill_chunk_size", "sliding_window_size", "attention_sink_size",
    "tensor_parallel_shards", "pipeline_parallel_stages", "disaggregation", "max_batch_size", "dtype",
    "kwargs", "position_embedding_base",
)  # fmt: skip
"""Keys of `model_config` that only MLC has; those that change the model are read in `_config`."""


class MlcCheckpoint(DirectoryCheckpoint):
    """See nearfar.build.weights.container.Checkpoint."""

    config_file = CONFIG
    lists = LISTS


def is_mlc(path: Path) -> bool:
    """Whether a directory has MLC's list of tensors."""
    return any((path / name).is_file() for name in LISTS)


def open_mlc(path: Path, name: str) -> MlcCheckpoint:
    """Open an MLC directory. Raises CheckpointError for anything missing, damaged or unsupported."""
    config = _config(read_json(path / CONFIG))
    check_tokenizer(path)
    listed = next(path / name for name in LISTS if (path / name).is_file())
    entries = _parts(listed_entries(listed), config)
    return MlcCheckpoint(path, name, config, dict(sorted(entries.items())))


def _config(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config to Hugging Face's keys."""
    top = ConfigReader(chat, CONFIG)
    model_type, given = chat.get("model_type"), chat.get("model_config")
    if model_type not in MODELS:
        raise top.error(
            f"model_type is {show(model_type)}, whose tensors in MLC's form are not read: use "
            f"{', '.join(MODELS)}, or the original checkpoint"
        )
    if not isinstance(given, Mapping):
        top.refuse("model_config", "an object")
    read = top.section("model_config")
    config = {key: value for key, value in given.items() if key not in OF_THE_RUNTIME}
    if given.get("sliding_window_size") not in (None, -1):
        read.refuse("sliding_window_size", "-1: MLC's windows keep the first tokens, which is not computed")
    config["model_type"] = model_type
    config["max_position_embeddings"] = read.size("context_window_size")
    if given.get("position_embedding_base"):
        config["rope_theta"] = given["position_embedding_base"]
    for key in ("bos_token_id", "eos_token_id"):
        if chat.get(key) is not None:
            config.setdefault(key, chat[key])
    quantization = chat.get("quantization")
    if quantization not in PLAIN:
        config["quantization_config"] = {"quant_method": "mlc", "name": quantization}
    return config


def listed_entries(listed: Path) -> dict[str, TensorEntry]:
    """The tensors of the list, each checked to be within its file."""
    shards = read_json(listed).get("records")
    if not isinstance(shards, list) or not all(isinstance(shard, Mapping) for shard in shards):
        raise CheckpointError(f"{listed}: records is not a list of files: download it again")
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        name, records = shard.get("dataPath"), shard.get("records")
        if not isinstance(name, str) or Path(name).name != name or not isinstance(records, list):
            raise CheckpointError(
                f"{listed}: a record has dataPath {show(name)}, which is not in the directory, or lists "
                "no tensors: download it again"
            )
        file = listed.parent / name
        if not file.is_file():
            raise CheckpointError(f"{listed}: names {name}, which is missing: download it")
        size = file.stat().st_size
        for record in records:
            tensor, entry = _entry(listed, file, size, record)
            if tensor in entries:
                raise CheckpointError(f"{listed}: lists tensor {tensor!r} twice: download it again")
            entries[tensor] = entry
    return entries


def _entry(listed: Path, file: Path, size: int, record: object) -> tuple[str, TensorEntry]:
    """Convert one tensor's record, after checking its bytes against shape, dtype and file."""
    known = record if isinstance(record, Mapping) else {}
    name, code, shape = (known.get(key) for key in ("name", "dtype", "shape"))
    offset, length = (known.get(key) for key in ("byteOffset", "nbytes"))
    sizes = [*shape, offset, length] if isinstance(shape, list) else [None]
    if not isinstance(name, str) or not all(type(item) is int and item >= 0 for item in sizes):
        raise CheckpointError(
            f"{listed}: a tensor has no valid name, shape, byteOffset and nbytes: {show(record)}: "
            "download it again"
        )
    assert isinstance(shape, list)
    assert isinstance(offset, int)
    assert isinstance(length, int)
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(
            f"{listed}: tensor {name!r} has dtype {show(code)}, which is not read: use a checkpoint of "
            f"{', '.join(DTYPES)}"
        )
    dtype, count = DTYPES[code], math.prod(shape)
    if code == "float32" and known.get("format") == "f32-to-bf16" and length == 2 * count:
        dtype = DTYPES["bfloat16"]
    if length != count * dtype.itemsize:
        raise CheckpointError(
            f"{listed}: tensor {name!r} {shape} {code} should be {count * dtype.itemsize:,} bytes, the list "
            f"says {length:,}: download it again"
        )
    if offset + length > size:
        raise CheckpointError(
            f"{file}: truncated: tensor {name!r} ends at byte {offset + length:,}, the file has {size:,}: "
            "download it again"
        )
    return name, TensorEntry(file, dtype, tuple(shape), offset, length)


def _parts(entries: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Rename the tensors to Hugging Face's names, with stacked tensors cut into their parts. Raises
    CheckpointError where row counts do not match.
    """
    read = ConfigReader(config, CONFIG, "model_config.")
    heads = read.size("num_attention_heads")
    head_dim = read.size("head_dim", read.size("hidden_size") // heads)
    kv, inner = read.size("num_key_value_heads", heads) * head_dim, read.size("intermediate_size")
    attention = {"q_proj": heads * head_dim, "k_proj": kv, "v_proj": kv}
    fused = {
        "self_attn.qkv_proj": attention,
        "self_attn.c_attn": attention,
        "mlp.gate_up_proj": {"gate_proj": inner, "up_proj": inner},
    }
    out: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        base, _, ending = name.rpartition(".")
        stacked = next((module for module in fused if base.endswith(f".{module}")), None)
        if stacked is None:
            out[name] = entry
            continue
        parts = fused[stacked]
        if not entry.shape or entry.shape[0] != sum(parts.values()):
            raise CheckpointError(
                f"tensor {name!r} is {list(entry.shape)}, where {CONFIG} makes {sum(parts.values())} rows of "
                f"{', '.join(parts)}: they do not belong together, download both again"
            )
        before, row = 0, entry.bytes // entry.shape[0]
        outer = base.removesuffix(stacked) + stacked.partition(".")[0]
        for part, rows in parts.items():
            offset = entry.offset + before * row
            shape = (rows, *entry.shape[1:])
            out[f"{outer}.{part}.{ending}"] = TensorEntry(entry.file, entry.dtype, shape, offset, rows * row)
            before += rows
    return out
