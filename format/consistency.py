"""Checks that a manifest agrees with itself, before anything is allocated: facts that types cannot
express.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from nearfar.format import bundle_files
from nearfar.format.buffers import buffers
from nearfar.format.manifest import Function, Kernel, Manifest, Program, StoredMatrix, StoredRows, Tensor
from nearfar.format.scales import CODE_BITS, FLOAT_BITS, GROUP_SIZES, HALF, SCALE_BITS, TABLE_BITS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.step.operation import problems_of
from nearfar.step.shapes import Shapes

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
}
PLANNED = {"generate": ("step", "greedy", "sample", "logprobs"), "embed": ("step",)}
"""The functions that a program must have, by the model's task."""


def problems(manifest: Manifest) -> Iterator[str]:
    """Every contradiction in a manifest, each with its name and values."""
    yield from _model(manifest)
    yield from _caches(manifest)
    found_step = list(_step(manifest))
    yield from found_step
    if manifest.weights.format == "stream":
        yield from _stream(manifest)
    else:
        yield from _safetensors(manifest)
    if not found_step:
        yield from _buffers(manifest)
    yield from _matrices(manifest)
    yield from _files(manifest)
    yield from bundle_files.problems(manifest)
    names = [program.name for program in manifest.programs]
    if len(set(names)) < len(names):
        yield f"programs have the same name: {', '.join(names)}"
    for program in manifest.programs:
        for problem in _program(manifest, program):
            yield f"program {program.name}: {problem}"


def _model(manifest: Manifest) -> Iterator[str]:
    model = manifest.model
    for token in (*model.eos_token_ids, *([] if model.bos_token_id is None else [model.bos_token_id])):
        if token >= model.vocab_size:
            yield f"special token {token} is not below model.vocab_size {model.vocab_size}"


def _caches(manifest: Manifest) -> Iterator[str]:
    used = {cache.group for cache in manifest.caches}
    if used != set(range(len(manifest.groups))):
        yield f"caches are of groups {sorted(used)}, and there are {len(manifest.groups)} groups"
    looks = [(group.window, group.stride) for group in manifest.groups]
    if len(set(looks)) < len(looks):
        yield f"two groups have the same window: {[window for window, _ in looks]}"
    for index, group in enumerate(manifest.groups):
        if group.stride is not None and (group.stride % manifest.cache.page_size or group.window != 2):
            yield (
                f"group {index} of states has window {group.window} and stride {group.stride}: the window "
                f"must be 2, the stride a multiple of the page_size {manifest.cache.page_size}"
            )
    for index, cache in enumerate(manifest.caches):
        strided = cache.group < len(manifest.groups) and manifest.groups[cache.group].stride is not None
        if (cache.parts == "state", cache.parts == "state") != (cache.depth > 0, strided):
            yield (
                f"cache {index} keeps {cache.parts} with depth {cache.depth}, in a group "
                f"{'with' if strided else 'without'} stride"
            )


def _step(manifest: Manifest) -> Iterator[str]:
    """The step must be readable, and agree with the manifest's caches, tables and weights."""
    try:
        ops = manifest.step.operations
        params = {param.name: param for param in manifest.step.parameters}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        yield f"step is not a list of operations and parameters: {error}"
        return
    if (manifest.model.task == "embed") != (manifest.step.embedding is not None):
        yield f"model.task is {manifest.model.task}, and the step ends in {ops[-1].op if ops else 'nothing'}"
    shapes = Shapes(params, manifest.caches, manifest.ropes)
    for op in ops:
        if found := problems_of(op, shapes):
            yield from (f"step: {op.out} {problem}" for problem in found)
            return  # the width of later operations' inputs is not known
        shapes.widths[op.out] = op.out_width(shapes)


def _stream(manifest: Manifest) -> Iterator[str]:
    """The shards must hold exactly the weight stream, and the tensors must follow one another in it."""
    weights = manifest.weights
    held = sum(shard.bytes for shard in weights.shards)
    if held != weights.bytes:
        yield f"the weight shards hold {held:,} bytes, weights.bytes is {weights.bytes:,}"
    for index, shard in enumerate(weights.shards):
        place = min(weights.shard_bytes, weights.bytes - index * weights.shard_bytes)
        if shard.bytes != place:
            yield f"{shard.file} is listed with {shard.bytes:,} bytes, its place in the stream is {place:,}"
    yield from _tensors(weights.tensors, weights.bytes)
    yield from _ropes(manifest)


def _tensors(tensors: Sequence[Tensor], total: int) -> Iterator[str]:
    if len({tensor.name for tensor in tensors}) < len(tensors):
        yield "weights.tensors names a tensor twice"
    for tensor in tensors:
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if tensor.bytes != size:
            yield f"tensor {tensor.name} has {tensor.bytes:,} bytes, its shape and dtype need {size:,}"
        if tensor.offset + tensor.bytes > total:
            yield (
                f"tensor {tensor.name} ends at {tensor.offset + tensor.bytes:,}, beyond the {total:,} bytes "
                "of weights"
            )
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes))
    for first, second in pairwise(ordered):
        if first.offset + first.bytes > second.offset:
            yield f"tensors {first.name} and {second.name} overlap"


def _matrices(manifest: Manifest) -> Iterator[str]:
    """The scheme of every matrix must be one of the format's, and must divide its rows."""
    for matrix in manifest.quantization.matrices:
        if matrix.pieces and sum(piece.n for piece in matrix.pieces) != matrix.n:
            yield f"matrix {matrix.name[:80]} has {matrix.n:,} rows, and its pieces have others"
        for rows in matrix.pieces or (matrix,):
            if not _is_scheme(rows, matrix.k):
                named = f"{rows.bits} bits, groups of {rows.group_size} and {rows.scales.words}"
                yield (
                    f"matrix {matrix.name[:80]} has an unknown scheme for rows of {matrix.k:,} weights: "
                    f"{named}"
                )


def _is_scheme(rows: StoredMatrix | StoredRows, k: int) -> bool:
    """Whether rows of k weights can be stored so: floats, or codes in whole groups and whole superblocks."""
    if not rows.group_size:
        return rows.bits in FLOAT_BITS
    scales = rows.scales
    long = scales.superblock or rows.group_size
    return (
        rows.bits in CODE_BITS
        and rows.group_size in GROUP_SIZES
        and long % rows.group_size == k % long == 0
        and (scales.bits in SCALE_BITS if scales.superblock else scales.bits == HALF)
        and (scales.table is None or (rows.bits == TABLE_BITS and not scales.offsets))
    )


def _ropes(manifest: Manifest) -> Iterator[str]:
    """The frequencies of each table must be in a tensor, half as long as a head of a cache."""
    halves = sorted({cache.head_dim // 2 for cache in manifest.caches if cache.parts == "kv"})
    tensors = {tensor.name: tensor for tensor in manifest.weights.tensors}
    named = [(name, each) for name, rope in manifest.ropes.items() for each in rope.all_frequencies()]
    for name, frequencies in named:
        tensor = tensors.get(str(frequencies))
        if tensor is None:
            yield f"ropes.{name}.inv_freq is {str(frequencies)[:80]!r}, which is not a tensor of the weights"
        elif tensor.dtype != "float32" or tensor.shape not in [(half,) for half in halves]:
            yield (
                f"tensor {tensor.name} is {tensor.dtype} {list(tensor.shape)}, "
                f"rope {name!r} needs float32 of one of the lengths {halves}"
            )


def _buffers(manifest: Manifest) -> Iterator[str]:
    """Every buffer must be one that a runtime knows, with the shape that the runtime fills."""
    tensors = {tensor.name: math.prod(tensor.shape) for tensor in manifest.weights.tensors}
    counts = {
        name: tensors.get(rope.inv_freq, 0) if isinstance(rope.inv_freq, str) else len(rope.inv_freq)
        for name, rope in manifest.ropes.items()
    }
    model, ropes = manifest.model, {name: 2 * count for name, count in counts.items()}
    expected = {
        buffer.name: buffer
        for buffer in buffers(
            model.vocab_size,
            model.context_length,
            manifest.cache,
            manifest.groups,
            manifest.caches,
            ropes,
            manifest.step.embedding,
        )
    }
    listed = {buffer.name: buffer for buffer in manifest.buffers}
    if len(listed) < len(manifest.buffers):
        yield "buffers names a buffer twice"
    if missing := expected.keys() - listed.keys():
        yield f"buffers lacks {min(missing)}"
    for name, buffer in listed.items():
        if name not in expected:
            yield f"buffer {name[:80]} is not one of the format's"
        elif buffer != expected[name]:
            wanted = expected[name]
            yield (
                f"buffer {name} is {buffer.dtype} {str(list(buffer.shape))[:80]}, "
                f"by the model and its caches it should be {wanted.dtype} {list(wanted.shape)}"
            )


def _safetensors(manifest: Manifest) -> Iterator[str]:
    weights = manifest.weights
    held = sum(shard.bytes for shard in weights.shards)
    if weights.tensors or not weights.shards or held != weights.bytes:
        yield (
            f"weights are {weights.format}, {len(weights.tensors)} tensors, {len(weights.shards)} files of "
            f"{held:,} bytes in all, stated {weights.bytes:,}; safetensors files list their tensors "
            "themselves"
        )
    halves = sorted({cache.head_dim // 2 for cache in manifest.caches if cache.parts == "kv"})
    for name, rope in manifest.ropes.items():
        if any(isinstance(each, str) or len(each) not in halves for each in rope.all_frequencies()):
            yield f"ropes.{name}.inv_freq should be as many numbers as one of {halves}, none below 0"
    if manifest.config is None:
        yield "config is missing: the record of config.json"


def _files(manifest: Manifest) -> Iterator[str]:
    """Programs that share a file must state the same hash of it."""
    hashes: dict[str, str | None] = {}
    for program in manifest.programs:
        for name, kernel in program.kernels.items():
            if kernel.file is not None and hashes.setdefault(kernel.file, kernel.sha256) != kernel.sha256:
                yield f"program {program.name}: kernel {name}: {kernel.file} has another SHA-256 elsewhere"


def _program(manifest: Manifest, program: Program) -> Iterator[str]:
    for name in PLANNED[manifest.model.task]:
        yield from _buckets(manifest, name, program.functions.get(name, ()))
    if (program.library is None) != (program.library_sha256 is None):
        yield "library and library_sha256 should name the shared library and its hash"
    for name, kernel in program.kernels.items():
        if not _fits(program, kernel):
            yield f"kernel {name} has neither the parameters of a library's function nor a file"


def _fits(program: Program, kernel: Kernel) -> bool:
    """Whether a kernel is a function of the program's library with parameters, or a shader file."""
    return bool(kernel.params) if program.library is not None else kernel.file is not None


def _buckets(manifest: Manifest, name: str, buckets: Sequence[Function]) -> Iterator[str]:
    """The buckets of a function must ascend, and their rows must fit the buffers."""
    found = [bucket.size for bucket in buckets]
    if not found or found != sorted(set(found)):
        yield f"{name} should have buckets of ascending size, it has {found}"
    for bucket in buckets:
        fits = bucket.size <= MAX_STEP and bucket.rows <= min(bucket.size, MAX_ROWS)
        if manifest.weights.format == "stream" and (bucket.plan is None or bucket.sha256 is None):
            yield f"{name} of size {bucket.size} has no plan"
        if not fits or (name != "step" and bucket.rows != bucket.size):
            yield f"{name} of size {bucket.size} has {bucket.rows} rows, which the buffers do not hold"
