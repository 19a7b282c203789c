"""A WebGPU artifact written by hand from docs/artifact.md: a "model" that recites a text, whatever it is asked.

Position p is followed by token p + 1 of the text, so answers are known, loading takes no time, and tests of the page
and of the runtime around the kernels need no compiler.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.format.seal import seal

SLOTS, CONTEXT, PAGE = 16, 1024, 16
BUCKETS = (1, 4, 16, 64, 256)
SHARD_BYTES = 4096

STEP = """
@group(0) @binding(0) var<storage, read> script : array<i32>;
@group(0) @binding(1) var<storage, read> positions : array<i32>;
@group(0) @binding(2) var<storage, read> logit_rows : array<i32>;
@group(0) @binding(3) var<storage, read_write> logits : array<f32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(64, 1, 1)
fn recite(@builtin(global_invocation_id) id : vec3<u32>) {
  let vocab = arrayLength(&logits) / 16u;
  if (id.x >= vocab) { return; }
  let at = u32(max(positions[logit_rows[id.y]], 0)) + 1u;
  let next = script[at % arrayLength(&script)];
  logits[id.y * vocab + id.x] = select(0.0, 1.0, i32(id.x) == next);
}
"""

CHOOSE = """
@group(0) @binding(0) var<storage, read> logits : array<f32>;
@group(0) @binding(1) var<storage, read> sample_i32 : array<i32>;
@group(0) @binding(2) var<storage, read_write> sampled : array<i32>;
@group(0) @binding(3) var<storage, read_write> tokens : array<i32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(1, 1, 1)
fn choose(@builtin(workgroup_id) id : vec3<u32>) {
  let vocab = arrayLength(&logits) / 16u;
  var best = 0u;
  for (var v = 1u; v < vocab; v++) {
    if (logits[id.x * vocab + v] > logits[id.x * vocab + best]) { best = v; }
  }
  sampled[id.x] = i32(best);
  let feed = sample_i32[id.x * 8u + 5u];
  if (feed >= 0) { tokens[feed] = i32(best); }
}
"""

SCORE = """
@group(0) @binding(0) var<storage, read> sampled : array<i32>;
@group(0) @binding(1) var<storage, read_write> logprob : array<f32>;
@group(0) @binding(2) var<storage, read_write> top_ids : array<i32>;
@group(0) @binding(3) var<storage, read_write> top_logprobs : array<f32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(1, 1, 1)
fn score(@builtin(workgroup_id) id : vec3<u32>) {
  logprob[id.x] = 0.0;
  for (var i = 0u; i < 20u; i++) {
    top_ids[id.x * 20u + i] = select(i32(i), sampled[id.x], i == 0u);
    top_logprobs[id.x * 20u + i] = select(-100.0, 0.0, i == 0u);
  }
}
"""


def write_toy_artifact(out: Path, checkpoint: Path, script: list[int]) -> Path:
    """Write OUT/webgpu: it recites the token ids of `script`, with the tokenizer of `checkpoint`."""
    root = out / "webgpu"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    vocab = config["vocab_size"]
    weights, tensors = _weights({"script": np.array(script, np.int32), "rope.inv_freq": np.ones(2, np.float32)})
    manifest = {
        "format": "nearfar-artifact",
        "version": 2,
        "target": "webgpu",
        "model": {
            **{"name": "toy", "architecture": "llama", "hidden_size": 4, "layers": 1, "heads": 1, "kv_heads": 1},
            **{"head_dim": 4, "vocab_size": vocab, "context_length": CONTEXT},
            **{"bos_token_id": config["bos_token_id"], "eos_token_ids": [config["eos_token_id"]]},
        },
        "cache": {"page_size": PAGE, "slots": SLOTS},
        "rope": {"inv_freq": "rope.inv_freq", "scale": 1.0},
        "quantization": {"scheme": "none"},
        "weights": {
            "bytes": len(weights),
            "shard_bytes": SHARD_BYTES,
            "shards": [
                _file(root, f"weights/{index:05d}.bin", weights[start : start + SHARD_BYTES])
                for index, start in enumerate(range(0, len(weights), SHARD_BYTES))
            ],
            "tensors": tensors,
        },
        "buffers": _buffers(vocab),
        "programs": [_program(root, vocab)],
        "memory": {"weights": len(weights), "kv_bytes_per_token": {"f32": 32}},
        "tokenizer": {"files": []},
        "license": "Apache-2.0",
        "provenance": {"nearfar": "0", "tvm": "none", "checkpoint": "toy", "checkpoint_sha256": "0" * 64},
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        manifest["tokenizer"]["files"].append(_file(root, f"tokenizer/{name}", (checkpoint / name).read_bytes()))
    _file(root, "manifest.json", seal(manifest).encode())
    return out


def copy_artifact(artifact: Path, to: Path) -> Path:
    """Copy an artifact, for a test that spoils it."""
    return Path(shutil.copytree(artifact, to))


def _weights(arrays: dict[str, np.ndarray]) -> tuple[bytes, list[dict[str, Any]]]:
    stream, tensors = b"", []
    for name, array in arrays.items():
        stream += b"\0" * (-len(stream) % 256)
        entry = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
        tensors.append({**entry, "offset": len(stream), "bytes": array.nbytes})
        stream += array.tobytes()
    return stream, tensors


def _buffers(vocab: int) -> list[dict[str, Any]]:
    shapes: dict[str, tuple[str, list[Any]]] = {
        "tokens": ("int32", [256]),
        "positions": ("int32", [256]),
        "slots": ("int32", [256]),
        "page_table": ("int32", [SLOTS, CONTEXT // PAGE]),
        "logit_rows": ("int32", [16]),
        "rope": ("float32", ["context", 4]),
        "kv.0.k": ("kv", ["pages", 1, PAGE, 4]),
        "kv.0.v": ("kv", ["pages", 1, PAGE, 4]),
        "logits": ("float32", [16, vocab]),
        "sample_f32": ("float32", [16, 8]),
        "sample_i32": ("int32", [16, 8]),
        "logit_bias": ("float32", [SLOTS, vocab]),
        "counts": ("int32", [SLOTS, vocab]),
        "allowed": ("uint32", [SLOTS, math.ceil(vocab / 32)]),
        "sampled": ("int32", [16]),
        "logprob": ("float32", [16]),
        "top_ids": ("int32", [16, 20]),
        "top_logprobs": ("float32", [16, 20]),
    }
    return [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in shapes.items()]


def _program(root: Path, vocab: int) -> dict[str, Any]:
    kernels = {
        "recite": _kernel(root, "recite", STEP, ["read", "read", "read", "read_write"]),
        "choose": _kernel(root, "choose", CHOOSE, ["read", "read", "read_write", "read_write"]),
        "score": _kernel(root, "score", SCORE, ["read", "read_write", "read_write", "read_write"]),
    }
    functions: dict[str, list[dict[str, Any]]] = {"step": [], "greedy": [], "sample": [], "logprobs": []}

    def add(function: str, size: int, kernel: str, grid: list[int], arguments: list[str]) -> None:
        rows = min(size, 16)
        launches = [{"kernel": kernel, "grid": grid, "args": arguments}]
        plan = {"function": function, "size": size, "rows": rows, "launches": launches}
        path = f"plans/f32/{function}.{size}.json"
        digest = _file(root, path, json.dumps(plan).encode())["sha256"]
        functions[function].append({"size": size, "rows": rows, "plan": path, "sha256": digest})

    for size in BUCKETS:
        grid = [math.ceil(vocab / 64), min(size, 16), 1]
        add("step", size, "recite", grid, ["weight:script", "buffer:positions", "buffer:logit_rows", "buffer:logits"])
    for rows in (1, 4, 16):
        for function in ("greedy", "sample"):
            arguments = ["buffer:logits", "buffer:sample_i32", "buffer:sampled", "buffer:tokens"]
            add(function, rows, "choose", [rows, 1, 1], arguments)
        told = ["buffer:sampled", "buffer:logprob", "buffer:top_ids", "buffer:top_logprobs"]
        add("logprobs", rows, "score", [rows, 1, 1], told)
    limits = {"maxStorageBuffersPerShaderStage": 8, "maxComputeInvocationsPerWorkgroup": 64}
    return {
        **{"precision": "f32", "kv_dtype": "float32", "requires": {"features": [], "limits": limits}},
        **{"workspace": [256], "library": None, "kernels": kernels, "functions": functions},
    }


def _kernel(root: Path, name: str, source: str, access: list[str]) -> dict[str, Any]:
    entry = _file(root, f"kernels/f32/{name}.wgsl", source.encode())
    return {"file": entry["file"], "entry": name, "access": access, "sha256": entry["sha256"]}


def _file(root: Path, path: str, data: bytes) -> dict[str, Any]:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return {"file": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
