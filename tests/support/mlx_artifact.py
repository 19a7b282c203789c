"""Unquantized MLX artifacts of small models that the build pipeline does not take, such as layers of two kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy.typing as npt

from nearfar.step.config import ConfigReader
from tests.support import tiny
from tests.support.numpy_executor import Weights

PAGE_SIZE, SLOTS = 16, 16


def write_mlx_artifact(out: Path, config: dict[str, Any], weights: Weights) -> Path:
    """A directory for `Engine.load`; `config` and `weights` are a Hugging Face llama's or mistral's."""
    import mlx.core as mx

    out.mkdir(parents=True)
    tensors = {name: mx.array(value) for name, value in weights.items()}
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>", "chat_template": tiny.TEMPLATE}))
    save_manifest(out, mlx_manifest(config))
    return out


def save_manifest(out: Path, data: dict[str, Any]) -> None:
    """Write the manifest over the files that lie there."""
    shard = tiny.describe(out, "model.safetensors")
    data["weights"] |= {"bytes": shard["bytes"], "shard_bytes": shard["bytes"], "shards": [shard]}
    data["memory"]["weights"] = shard["bytes"]
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    data["tokenizer"]["files"] = [tiny.describe(out, name) for name in names if (out / name).exists()]
    data["config"] = tiny.describe(out, "config.json")
    tiny.save_manifest(out, data)


def mlx_manifest(config: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a model, but for its files."""
    data = tiny.manifest_dict(config, page_size=PAGE_SIZE, slots=SLOTS, target="mlx")
    model, rope = data["model"], ConfigReader(config).rope()
    bytes_f32 = data["memory"]["kv_bytes_per_token"]["f32"]
    functions = {
        name: [{"size": bucket["size"], "rows": bucket["rows"]} for bucket in buckets]
        for name, buckets in data["programs"][0]["functions"].items()
    }
    program = {"workspace": [], "library": None, "kernels": {}, "functions": functions}
    frequencies: npt.NDArray[Any] = rope.inv_freq(model["head_dim"])
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * model["layers"]
    data |= {
        "model": {**model, "architecture": config["model_type"], "sliding_window": window, "layer_types": kinds},
        "rope": {"inv_freq": [float(f) for f in frequencies], "scale": 1.0},
        "quantization": {"scheme": "none"},
        "weights": {"format": "safetensors", "bytes": 0, "shard_bytes": 1, "shards": [], "tensors": []},
        "buffers": _buffers(data["model"]),
        "programs": [
            {"precision": "f16", "kv_dtype": "float16", "requires": {"features": ["metal"]}, **program},
            {"precision": "f32", "kv_dtype": "float32", "requires": {"features": []}, **program},
        ],
        "memory": {"weights": 0, "kv_bytes_per_token": {"f16": bytes_f32 // 2, "f32": bytes_f32}},
    }
    return data


def _buffers(model: dict[str, Any]) -> list[dict[str, Any]]:
    vocab, context = model["vocab_size"], model["context_length"]
    shapes: dict[str, tuple[str, list[Any]]] = {
        "tokens": ("int32", [256]), "positions": ("int32", [256]), "slots": ("int32", [256]),
        "page_table": ("int32", [SLOTS, -(-context // PAGE_SIZE)]), "logit_rows": ("int32", [16]),
        "logits": ("float32", [16, vocab]), "sample_f32": ("float32", [16, 8]), "sample_i32": ("int32", [16, 8]),
        "logit_bias": ("float32", [SLOTS, vocab]), "counts": ("int32", [SLOTS, vocab]),
        "allowed": ("uint32", [SLOTS, (vocab + 31) // 32]), "sampled": ("int32", [16]), "logprob": ("float32", [16]),
        "top_ids": ("int32", [16, 20]), "top_logprobs": ("float32", [16, 20]),
    }  # fmt: skip
    return [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in shapes.items()]
