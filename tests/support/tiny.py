"""A tiny random llama with a byte tokenizer: everything that a test of the engine needs, without files from
outside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.format import buffers as table
from nearfar.format.manifest import VERSION, Cache, Group, KvCache, Manifest
from nearfar.format.manifest_file import parse
from nearfar.format.seal import BLANK, seal
from nearfar.step.model import op_record, param_record
from nearfar.step.reading import read_model
from tests.support.numpy_executor import NumpyExecutor, Weights

SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 261,
    "max_position_embeddings": 160,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> Weights:
    """Random weights, large enough that the argmax is not a close call."""
    rng = np.random.default_rng(seed)
    hidden, inner, hd = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    out: Weights = {"model.embed_tokens.weight": rng.normal(0, 1, (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            out[f"model.layers.{layer}.{name}.weight"] = rng.normal(0, 1.5 / shape[1] ** 0.5, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden)
    out["model.norm.weight"] = np.ones(hidden)
    return {name: value.astype(np.float32) for name, value in out.items()}


def manifest_dict(
    config: dict[str, Any] = CONFIG, *, page_size: int = 16, slots: int = 8, target: str = "cpu"
) -> dict[str, Any]:
    """A manifest of the model. Of the weights it lists only the frequencies, and it has no kernels."""
    model = read_model(config).model
    step = model.step
    head_dim = next((c.head_dim for c in step.caches if c.parts == "kv"), 0)
    groups = tuple(Group(group.window, group.stride) for group in step.groups)
    caches = tuple(
        KvCache(c.kv_heads, c.head_dim, step.group(index), c.parts, c.depth)
        for index, c in enumerate(step.caches)
    )
    buffers = table.buffers(
        model.vocab_size, model.context_length, Cache(page_size, slots), groups, caches, {"rope": head_dim}
    )

    def buckets(name: str, sizes: list[int]) -> list[dict[str, Any]]:
        return [
            {"size": s, "rows": min(s, 16), "plan": f"plans/f32/{name}.{s}.json", "sha256": BLANK}
            for s in sizes
        ]

    functions = {"step": buckets("step", [1, 4, 16, 64, 256])}
    functions |= {name: buckets(name, [1, 4, 16]) for name in ("greedy", "sample", "logprobs")}
    rope = {
        "name": "rope.inv_freq",
        "dtype": "float32",
        "shape": [head_dim // 2],
        "offset": 0,
        "bytes": 2 * head_dim,
    }
    shard = {"file": "weights/00000.bin", "bytes": 2 * head_dim, "sha256": BLANK}
    stream = {"bytes": shard["bytes"], "shard_bytes": 33554432, "shards": [shard], "tensors": [rope]}
    data = {
        "format": "nearfar-artifact",
        "version": VERSION,
        "target": target,
        "model": {
            "name": "tiny",
            "architecture": model.architecture,
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "bos_token_id": model.bos_token_id,
            "eos_token_ids": list(model.eos_token_ids),
        },
        "cache": {"page_size": page_size, "slots": slots},
        "groups": [dataclasses.asdict(group) for group in groups],
        "caches": [dataclasses.asdict(cache) for cache in caches],
        "ropes": {"rope": {"inv_freq": "rope.inv_freq", "scale": 1.0}},
        "step": {
            "ops": [op_record(op) for op in step.ops],
            "params": [param_record(param) for param in step.params],
        },
        "quantization": {"scheme": "none"},
        "weights": stream,
        "buffers": [{"name": b.name, "dtype": b.dtype, "shape": list(b.shape)} for b in buffers],
        "programs": [
            {
                "name": "f32",
                "activations": "float32",
                "kv_dtype": "float32",
                "workspace": [],
                "requires": {"features": [], "limits": {}},
                "library": "kernels/f32/model.so",
                "library_sha256": BLANK,
                "kernels": {},
                "functions": functions,
            }
        ],
        "tokenizer": {"files": []},
        "provenance": {},
        "manifest_sha256": BLANK,
    }
    if target == "mlx":
        data["ropes"]["rope"]["inv_freq"] = [1.0] * (head_dim // 2)
        data["weights"] = {**stream, "format": "safetensors", "tensors": []}
        data["config"] = {"file": "config.json", "bytes": 2, "sha256": BLANK}
    return data


def manifest(config: dict[str, Any] = CONFIG, **options: int) -> Manifest:
    """The manifest of `manifest_dict`, parsed."""
    return parse(manifest_dict(config, **options), "manifest.json")


def core(
    *,
    pages: int | Sequence[int] = 64,
    pipelined: bool = True,
    slots: int = 8,
    page_size: int = 16,
    seed: int = 0,
    config: dict[str, Any] = CONFIG,
    made: Weights | None = None,
) -> EngineCore:
    """An engine over the tiny model; the seed of its weights stands for the checkpoint's hash. `pages`: pages
    of each group. `made`: weights of another architecture.
    """
    tensors = weights(config, seed) if made is None else made
    executor = NumpyExecutor(config, tensors, pages=pages, page_size=page_size, slots=slots)
    description = manifest(config, slots=slots, page_size=page_size)
    description = replace(description, provenance={"checkpoint_sha256": f"{seed:064x}"})
    counts = [pages] * len(description.groups) if isinstance(pages, int) else pages
    return EngineCore(executor, description, description.programs[0], counts, pipelined=pipelined)


def tokenizer() -> Tokenizer:
    """A tokenizer with one token for each byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def write_artifact(path: Path) -> Path:
    """An artifact directory that passes verification (its kernels cannot run)."""
    data = manifest_dict()
    library = path / "kernels" / "f32" / "model.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no code")
    data["programs"][0]["library_sha256"] = hashlib.sha256(b"no code").hexdigest()
    (path / "tokenizer").mkdir()
    tokenizer().save(str(path / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        data["tokenizer"]["files"].append(describe(path, f"tokenizer/{name}"))
    stream = np.arange(1000, dtype=np.uint32).tobytes()
    (path / "weights").mkdir()
    data["weights"]["shards"] = []
    for index in range(0, len(stream), 1024):
        name = f"weights/{index // 1024:05}.bin"
        (path / name).write_bytes(stream[index : index + 1024])
        data["weights"]["shards"].append(describe(path, name))
    data["weights"] |= {"bytes": len(stream), "shard_bytes": 1024, "tensors": [
        {"name": "a", "dtype": "uint32", "shape": [10, 10], "offset": 0, "bytes": 400},
        {"name": "b", "dtype": "uint32", "shape": [800], "offset": 512, "bytes": 3200},
        {"name": "rope.inv_freq", "dtype": "float32", "shape": [4], "offset": 3840, "bytes": 16},
    ]}  # fmt: skip
    for name, buckets in data["programs"][0]["functions"].items():
        for bucket in buckets:
            plan = path / bucket["plan"]
            plan.parent.mkdir(parents=True, exist_ok=True)
            plan.write_text(
                json.dumps({"function": name, "size": bucket["size"], "rows": bucket["rows"], "launches": []})
            )
            bucket["sha256"] = describe(path, bucket["plan"])["sha256"]
    save_manifest(path, data)
    return path


def save_manifest(path: Path, data: dict[str, Any]) -> None:
    """Write manifest.json with the digest of its own bytes."""
    (path / "manifest.json").write_bytes(seal(data).encode())


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an artifact's manifest, with a new digest, as if the build had written it so."""
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    save_manifest(path, data)


def describe(root: Path, name: str) -> dict[str, Any]:
    """A file entry of the manifest."""
    data = (root / name).read_bytes()
    return {"file": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
