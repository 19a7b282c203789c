"""Whether what a manifest says adds up: facts that no type can tell, each checked once, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearfar.format.manifest import Function, Kernel, Manifest, Program, Tensor

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "int32": 4, "uint32": 4, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1
}  # fmt: skip
PLANNED = ("step", "greedy", "sample", "logprobs")


def problems(manifest: Manifest) -> Iterator[str]:
    """Everything that does not add up, each by name with its values."""
    yield from _model(manifest)
    if manifest.target == "mlx":
        yield from _safetensors(manifest)
    else:
        yield from _stream(manifest)
    names = [program.precision for program in manifest.programs]
    if len(set(names)) < len(names):
        yield f"programs have the same precision: {', '.join(names)}"
    for program in manifest.programs:
        for problem in _program(manifest, program):
            yield f"program {program.precision}: {problem}"


def _model(manifest: Manifest) -> Iterator[str]:
    model = manifest.model
    if model.heads % model.kv_heads:
        yield f"model.heads {model.heads} is no multiple of kv_heads {model.kv_heads}"
    if model.head_dim % 2:
        yield f"model.head_dim is {model.head_dim}, which is odd"
    for token in (*model.eos_token_ids, *([] if model.bos_token_id is None else [model.bos_token_id])):
        if token >= model.vocab_size:
            yield f"special token {token} is not below model.vocab_size {model.vocab_size}"
    if model.layer_types and len(model.layer_types) != model.layers:
        yield f"model.layer_types has {len(model.layer_types)} entries for {model.layers} layers"
    if "sliding_attention" in model.layer_types and model.sliding_window is None:
        yield "model.layer_types has sliding_attention, but there is no sliding_window"


def _stream(manifest: Manifest) -> Iterator[str]:
    """The shards must hold exactly the stream that the tensors lie in, side by side."""
    weights = manifest.weights
    if weights.format != "stream":
        yield f"weights.format is {weights.format}; target {manifest.target} reads a stream"
        return
    held = sum(shard.bytes for shard in weights.shards)
    if held != weights.bytes:
        yield f"the weight shards hold {held:,} bytes, weights.bytes is {weights.bytes:,}"
    for index, shard in enumerate(weights.shards):
        place = min(weights.shard_bytes, weights.bytes - index * weights.shard_bytes)
        if shard.bytes != place:
            yield f"{shard.file} is listed with {shard.bytes:,} bytes, its place in the stream is {place:,}"
    yield from _tensors(weights.tensors, weights.bytes)
    yield from _rope(manifest)


def _tensors(tensors: Sequence[Tensor], total: int) -> Iterator[str]:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        yield "weights.tensors names a tensor twice"
    for tensor in tensors:
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if tensor.bytes != size:
            yield f"tensor {tensor.name} has {tensor.bytes:,} bytes, its shape and dtype need {size:,}"
        if tensor.offset + tensor.bytes > total:
            yield f"tensor {tensor.name} ends at {tensor.offset + tensor.bytes:,}, beyond the {total:,} bytes of weights"
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes))
    for first, second in pairwise(ordered):
        if first.offset + first.bytes > second.offset:
            yield f"tensors {first.name} and {second.name} overlap"


def _rope(manifest: Manifest) -> Iterator[str]:
    name, half = manifest.rope.inv_freq, manifest.model.head_dim // 2
    tensor = next((tensor for tensor in manifest.weights.tensors if tensor.name == name), None)
    if tensor is None:
        yield f"rope.inv_freq is {str(name)[:80]!r}, which is no tensor of the weights"
    elif (tensor.dtype, tensor.shape) != ("float32", (half,)):
        yield f"tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, rope needs float32 [{half}]"


def _safetensors(manifest: Manifest) -> Iterator[str]:
    weights, frequencies = manifest.weights, manifest.rope.inv_freq
    held = sum(shard.bytes for shard in weights.shards)
    if weights.format != "safetensors" or weights.tensors or not weights.shards or held != weights.bytes:
        yield (
            f"weights are {weights.format}, {len(weights.tensors)} tensors, {len(weights.shards)} files of {held:,} bytes in "
            f"all, stated {weights.bytes:,}; target mlx reads safetensors files, which list their tensors themselves"
        )
    half = manifest.model.head_dim // 2
    if isinstance(frequencies, str) or len(frequencies) != half or not all(value > 0 for value in frequencies):
        yield f"rope.inv_freq should be {half} numbers above 0"
    if manifest.config is None:
        yield "config is missing: the record of config.json"


def _program(manifest: Manifest, program: Program) -> Iterator[str]:
    if program.precision not in manifest.memory.kv_bytes_per_token:
        yield "memory.kv_bytes_per_token does not have it"
    for name in PLANNED:
        yield from _buckets(manifest, name, program.functions[name])
    if manifest.target == "cpu" and (program.library is None or program.library_sha256 is None):
        yield "library and library_sha256 should name the shared library and its hash"
    for name, kernel in program.kernels.items():
        if not _fits(manifest.target, kernel):
            yield f"kernel {name} does not have what target {manifest.target} needs"


def _fits(target: str, kernel: Kernel) -> bool:
    if target == "cpu":
        return bool(kernel.params)
    return kernel.file is not None and (target != "vulkan" or len(kernel.workgroup) == 3)


def _buckets(manifest: Manifest, name: str, buckets: Sequence[Function]) -> Iterator[str]:
    """Ascending sizes with the rows that they have; within the buffers, where the manifest lists them."""
    sizes = [bucket.size for bucket in buckets]
    if not sizes or sizes != sorted(set(sizes)):
        yield f"{name} should have buckets of ascending size, it has {sizes}"
    shapes = {buffer.name: buffer.shape for buffer in manifest.buffers}
    most, rows = _extent(shapes, "tokens"), _extent(shapes, "logits")
    for bucket in buckets:
        fits = bucket.size <= most and bucket.rows <= min(bucket.size, rows)
        if not fits or (name != "step" and bucket.rows != bucket.size):
            yield f"{name} of size {bucket.size} has {bucket.rows} rows, which the buffers do not hold"


def _extent(shapes: Mapping[str, Sequence[int | str]], name: str) -> float:
    """Rows of a buffer; endless where it is not listed."""
    first = next(iter(shapes.get(name, ())), None)
    return first if isinstance(first, int) else math.inf
