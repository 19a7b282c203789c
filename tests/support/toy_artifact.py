"""A WebGPU artifact written by hand from docs/artifact.md: a "model" that recites a text for every prompt.

Position p is followed by token p + 1 of the text. So answers are known, loading takes no time, and tests of
the page and of the runtime around the kernels need no compiler.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.format.adapters import DeviceClass
from nearfar.format.buffers import buffers
from nearfar.format.manifest import (
    FORMAT,
    VERSION,
    Cache,
    File,
    Function,
    Group,
    Kernel,
    KvCache,
    Manifest,
    Model,
    Program,
    Quantization,
    Requires,
    Rope,
    StepRecords,
    Tensor,
    TokenizerFiles,
    Weights,
)
from nearfar.format.manifest_file import document
from nearfar.format.plans import Launch, Plan
from nearfar.format.sampler import COLUMNS, SampleI32
from nearfar.format.seal import seal
from nearfar.format.sizes import MAX_ROWS, PAGE_SIZE, ROW_BUCKETS, STEP_BUCKETS, TOP_LOGPROBS
from tests.shared_data import shared_data

CONTEXT, HEAD_DIM = 1024, 4
SHARD_BYTES = 4096

WASTED = "wasted"
"""The name in STEP for the number of rounds of a loop that changes nothing."""
STEP_ACCESS = ["read", "read", "read", "read_write"]

STEP = f"""
@group(0) @binding(0) var<storage, read> script : array<i32>;
@group(0) @binding(1) var<storage, read> positions : array<i32>;
@group(0) @binding(2) var<storage, read> logit_rows : array<i32>;
@group(0) @binding(3) var<storage, read_write> logits : array<f32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(64, 1, 1)
fn recite(@builtin(global_invocation_id) id : vec3<u32>) {{
  let vocab = arrayLength(&logits) / {MAX_ROWS}u;
  if (id.x >= vocab) {{ return; }}
  let at = u32(max(positions[logit_rows[id.y]], 0)) + 1u;
  let next = script[at % arrayLength(&script)];
  var spun = id.x;
  for (var i = 0u; i < u32({WASTED}); i++) {{ spun = spun * 1664525u + 1013904223u; }}
  if (spun == 1u) {{ return; }}
  logits[id.y * vocab + id.x] = select(0.0, 1.0, i32(id.x) == next);
}}
"""

CHOOSE = f"""
@group(0) @binding(0) var<storage, read> logits : array<f32>;
@group(0) @binding(1) var<storage, read> sample_i32 : array<i32>;
@group(0) @binding(2) var<storage, read_write> sampled : array<i32>;
@group(0) @binding(3) var<storage, read_write> tokens : array<i32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(1, 1, 1)
fn choose(@builtin(workgroup_id) id : vec3<u32>) {{
  let vocab = arrayLength(&logits) / {MAX_ROWS}u;
  var best = 0u;
  for (var v = 1u; v < vocab; v++) {{
    if (logits[id.x * vocab + v] > logits[id.x * vocab + best]) {{ best = v; }}
  }}
  sampled[id.x] = i32(best);
  let feed = sample_i32[id.x * {COLUMNS}u + {SampleI32.FEED:d}u];
  if (feed >= 0) {{ tokens[feed] = i32(best); }}
}}
"""

SCORE = f"""
@group(0) @binding(0) var<storage, read> sampled : array<i32>;
@group(0) @binding(1) var<storage, read_write> logprob : array<f32>;
@group(0) @binding(2) var<storage, read_write> top_ids : array<i32>;
@group(0) @binding(3) var<storage, read_write> top_logprobs : array<f32>;
@group(0) @binding(4) var<uniform> packGridDimX : u32;
@compute @workgroup_size(1, 1, 1)
fn score(@builtin(workgroup_id) id : vec3<u32>) {{
  logprob[id.x] = 0.0;
  for (var i = 0u; i < {TOP_LOGPROBS}u; i++) {{
    top_ids[id.x * {TOP_LOGPROBS}u + i] = select(i32(i), sampled[id.x], i == 0u);
    top_logprobs[id.x * {TOP_LOGPROBS}u + i] = select(-100.0, 0.0, i == 0u);
  }}
}}
"""


def heldout_script(characters: int) -> tuple[Any, list[int]]:
    """A tokenizer, and the tokens of the beginning of a text, for an artifact to recite."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(shared_data("models", "classics-7M", "tokenizer.json")))
    text = shared_data("text", "heldout.txt").read_text(encoding="utf-8")[:characters]
    return tokenizer, tokenizer.encode(text).ids


def write_toy_artifact(
    out: Path, checkpoint: Path, script: list[int], classes: Mapping[DeviceClass, int] | None = None
) -> Path:
    """Write OUT/webgpu: it recites the token ids of `script`, with the tokenizer of `checkpoint`.

    It has a program for each of `classes`, whose steps waste this many rounds of a loop; without classes,
    just one program, "f32".
    """
    root = out / "webgpu"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    vocab = config["vocab_size"]
    inv_freq = np.ones(HEAD_DIM // 2, np.float32)
    weights = _weights(root, {"script": np.array(script, np.int32), "rope.base.inv_freq": inv_freq})
    cache, groups, caches = Cache(PAGE_SIZE, MAX_ROWS), (Group(),), (KvCache(1, HEAD_DIM, 0),)
    model = Model("toy", "llama", vocab, CONTEXT, config["bos_token_id"], (config["eos_token_id"],))
    tokenizer = [
        _file(root, f"tokenizer/{name}", (checkpoint / name).read_bytes())
        for name in ("tokenizer.json", "tokenizer_config.json")
    ]
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        target="webgpu",
        model=model,
        cache=cache,
        groups=groups,
        caches=caches,
        ropes={"base": Rope("rope.base.inv_freq", 1.0)},
        step=StepRecords((), ()),
        quantization=Quantization("none"),
        weights=weights,
        buffers=buffers(vocab, CONTEXT, cache, groups, caches, {"base": HEAD_DIM}),
        programs=tuple(_program(root, vocab, *each) for each in (classes or {None: 0}).items()),
        tokenizer=TokenizerFiles(tuple(tokenizer)),
        license="Apache-2.0",
        provenance={"nearfar": "0", "tvm": "none", "checkpoint": "toy", "checkpoint_sha256": "0" * 64},
    )
    _file(root, "manifest.json", seal(document(manifest)).encode())
    return out


def copy_artifact(artifact: Path, to: Path) -> Path:
    """Copy an artifact, for a test that spoils it."""
    return Path(shutil.copytree(artifact, to))


def _weights(root: Path, arrays: dict[str, np.ndarray]) -> Weights:
    stream, tensors = b"", []
    for name, array in arrays.items():
        stream += b"\0" * (-len(stream) % 256)
        tensors.append(Tensor(name, str(array.dtype), array.shape, len(stream), array.nbytes))
        stream += array.tobytes()
    shards = (
        _file(root, f"weights/{index:05d}.bin", stream[start : start + SHARD_BYTES])
        for index, start in enumerate(range(0, len(stream), SHARD_BYTES))
    )
    return Weights(len(stream), SHARD_BYTES, tuple(shards), tuple(tensors))


def _program(root: Path, vocab: int, device_class: DeviceClass | None, wasted: int) -> Program:
    name = f"{device_class}-f32" if device_class else "f32"
    # A browser's error, and a test that waits for one, tell programs by their kernels.
    recite = f"recite_{device_class}" if device_class else "recite"
    kernels = {
        recite: _kernel(root, name, "recite", STEP.replace(WASTED, str(wasted)), STEP_ACCESS),
        "choose": _kernel(root, name, "choose", CHOOSE, ["read", "read", "read_write", "read_write"]),
        "score": _kernel(root, name, "score", SCORE, ["read", "read_write", "read_write", "read_write"]),
    }
    functions: dict[str, tuple[Function, ...]] = {"step": (), "greedy": (), "sample": (), "logprobs": ()}

    def add(function: str, size: int, kernel: str, grid: tuple[int, ...], arguments: list[str]) -> None:
        rows = min(size, MAX_ROWS)
        plan = Plan(function, size, rows, (Launch(kernel, tuple(arguments), grid),))
        path = f"plans/{name}/{function}.{size}.json"
        digest = _file(root, path, json.dumps(dataclasses.asdict(plan)).encode()).sha256
        functions[function] += (Function(size, rows, path, digest),)

    for size in STEP_BUCKETS:
        grid = (math.ceil(vocab / 64), min(size, MAX_ROWS), 1)
        add(
            "step",
            size,
            recite,
            grid,
            ["weight:script", "buffer:positions", "buffer:logit_rows", "buffer:logits"],
        )
    for rows in ROW_BUCKETS:
        for function in ("greedy", "sample"):
            arguments = ["buffer:logits", "buffer:sample_i32", "buffer:sampled", "buffer:tokens"]
            add(function, rows, "choose", (rows, 1, 1), arguments)
        told = ["buffer:sampled", "buffer:logprob", "buffer:top_ids", "buffer:top_logprobs"]
        add("logprobs", rows, "score", (rows, 1, 1), told)
    limits = {"maxStorageBuffersPerShaderStage": 8, "maxComputeInvocationsPerWorkgroup": 64}
    requires = Requires((), limits)
    return Program(
        name, "float32", "float32", requires, (256,), kernels, functions, device_class=device_class
    )


def _kernel(root: Path, program: str, entry: str, source: str, access: list[str]) -> Kernel:
    file = _file(root, f"kernels/{program}/{entry}.wgsl", source.encode())
    return Kernel(file.file, entry, tuple(access), file.sha256)


def _file(root: Path, path: str, data: bytes) -> File:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return File(path, len(data), hashlib.sha256(data).hexdigest())
