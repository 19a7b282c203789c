"""The manifest: what an artifact says of itself (docs/artifact.md)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import tvm

import nearfar
from nearfar.build.weights.checkpoint import Checkpoint
from nearfar.build.weights.quantize import Scheme
from nearfar.build.weights.stream import Report
from nearfar.format.sizes import MAX_ROWS, MAX_STEP, TOP_LOGPROBS, CacheLayout
from nearfar.step.config import ModelConfig

ROPE_WEIGHT = "rope.inv_freq"


def buffers(config: ModelConfig, cache: CacheLayout) -> list[dict[str, Any]]:
    """Every buffer a plan can name that is neither weight nor workspace."""
    vocab, rows = config.vocab_size, MAX_ROWS
    shapes: dict[str, tuple[str, list[int | str]]] = {
        "tokens": ("int32", [MAX_STEP]),
        "positions": ("int32", [MAX_STEP]),
        "slots": ("int32", [MAX_STEP]),
        "page_table": ("int32", [cache.slots, cache.pages_per_slot]),
        "logit_rows": ("int32", [rows]),
        "rope": ("float32", ["context", config.head_dim]),
        "logits": ("float32", [rows, vocab]),
        "sample_f32": ("float32", [rows, 8]),
        "sample_i32": ("int32", [rows, 8]),
        "logit_bias": ("float32", [cache.slots, vocab]),
        "counts": ("int32", [cache.slots, vocab]),
        "allowed": ("uint32", [cache.slots, -(-vocab // 32)]),
        "sampled": ("int32", [rows]),
        "logprob": ("float32", [rows]),
        "top_ids": ("int32", [rows, TOP_LOGPROBS]),
        "top_logprobs": ("float32", [rows, TOP_LOGPROBS]),
    }
    page: list[int | str] = ["pages", config.kv_heads, cache.page_size, config.head_dim]
    for layer in range(config.layers):
        shapes[f"kv.{layer}.k"] = ("kv", list(page))
        shapes[f"kv.{layer}.v"] = ("kv", list(page))
    return [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in shapes.items()]


def model_section(name: str, config: ModelConfig) -> dict[str, Any]:
    """The manifest's `model`; windows only where the model has them."""
    section: dict[str, Any] = {
        "name": name,
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
    }
    if config.sliding_window is not None:
        section |= {"sliding_window": config.sliding_window, "layer_types": list(config.layer_types)}
    return section


def quantization_section(scheme: Scheme, report: Report) -> dict[str, Any]:
    """The manifest's `quantization`."""
    return {
        "scheme": scheme.name,
        "bits": scheme.bits,
        "group_size": scheme.group_size if scheme.bits else 0,
        "method": _method(report) if scheme.bits else "none",
        "quantized": report.quantized,
        "dense": report.dense,
    }


def _method(report: Report) -> str:
    rounded = f"; {report.rounded:,} scales and biases rounded to float16" if report.rounded else ""
    return report.method + rounded


def memory_section(config: ModelConfig, weight_bytes: int) -> dict[str, Any]:
    """Bytes of the weights, and of one cached token by precision of the cache."""
    values = 2 * config.layers * config.kv_heads * config.head_dim
    return {"weights": weight_bytes, "kv_bytes_per_token": {"f16": 2 * values, "f32": 4 * values}}


def provenance_section(checkpoint: Checkpoint, sha256: str) -> dict[str, Any]:
    """Where the artifact came from. No times or paths: the same input gives the same bytes."""
    return {
        "nearfar": nearfar.__version__,
        "tvm": tvm.__version__,
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": sha256,
    }


def file_record(root: Path, file: Path) -> dict[str, Any]:
    """Path, bytes and SHA-256 of a file of the artifact."""
    data = file.read_bytes()
    return {"file": file.relative_to(root).as_posix(), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
