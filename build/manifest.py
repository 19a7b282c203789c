"""Makes the parts of an artifact's manifest (the records are in nearfar.format)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm

from nearfar.build.weights.container import Checkpoint
from nearfar.build.weights.quantize import METHOD
from nearfar.build.weights.stream import KEPT, WeightsReport
from nearfar.format import buffers as table
from nearfar.format.manifest import (
    OLDEST,
    SCALED,
    VERSION,
    Buffer,
    Cache,
    Group,
    KvCache,
    Quantization,
    Rope,
    ShortRope,
    StepRecords,
    StoredMatrix,
    StoredRows,
)
from nearfar.format.manifest import Model as ModelRecord
from nearfar.format.scales import PAIRS
from nearfar.format.sizes import MAX_ROWS, PAGE_SIZE
from nearfar.kernels.quantized import Matrix
from nearfar.step.model import Model, Step, op_record, param_record
from nearfar.step.rope import Rope as StepRope
from nearfar.version import __version__

CACHE = Cache(page_size=PAGE_SIZE, slots=MAX_ROWS)


def groups(step: Step) -> tuple[Group, ...]:
    """The page groups of a step's caches."""
    return tuple(Group(group.window, group.stride) for group in step.groups)


def caches(step: Step) -> tuple[KvCache, ...]:
    """The caches of a step."""
    return tuple(
        KvCache(c.kv_heads, c.head_dim, step.group(index), c.parts, c.depth)
        for index, c in enumerate(step.caches)
    )


def buffers(model: Model) -> tuple[Buffer, ...]:
    """Every buffer of a model's artifacts."""
    step = model.step
    ropes = {name: 2 * len(rope.inv_freq) for name, rope in step.ropes.items()}
    return table.buffers(
        model.vocab_size, model.context_length, CACHE, groups(step), caches(step), ropes, model.embedding
    )


def model_record(name: str, model: Model) -> ModelRecord:
    """The manifest's `model`."""
    return ModelRecord(
        name,
        model.architecture,
        model.vocab_size,
        model.context_length,
        model.bos_token_id,
        model.eos_token_ids,
        "generate" if model.embedding is None else "embed",
    )


def step_records(step: Step) -> StepRecords:
    """The manifest's `step`."""
    return StepRecords(tuple(map(op_record, step.ops)), tuple(map(param_record, step.params)))


def rope_tensors(step: Step) -> dict[str, tuple[float, ...]]:
    """The frequencies of all rotation tables, by the names of their tensors."""
    tensors = {}
    for name, rope in step.ropes.items():
        tensors[_rope_tensor(name)] = rope.inv_freq
        if rope.short is not None:
            tensors[_rope_tensor(name, "short")] = rope.short.inv_freq
    return tensors


def _rope_tensor(*parts: str) -> str:
    return ".".join(("rope", *parts, "inv_freq"))


def stream_ropes(step: Step) -> dict[str, Rope]:
    """The manifest's `ropes` for targets whose weight stream holds the frequencies as tensors."""
    return {
        name: _rope(rope, _rope_tensor(name), _rope_tensor(name, "short"))
        for name, rope in step.ropes.items()
    }


def listed_ropes(step: Step) -> dict[str, Rope]:
    """The manifest's `ropes` with the frequencies written into the manifest."""
    return {
        name: _rope(rope, rope.inv_freq, rope.short.inv_freq if rope.short else ())
        for name, rope in step.ropes.items()
    }


def _rope(rope: StepRope, long: str | tuple[float, ...], short: str | tuple[float, ...]) -> Rope:
    return Rope(long, rope.scale, ShortRope(short, rope.short.context) if rope.short else None)


def version(matrices: Mapping[str, Matrix]) -> int:
    """The oldest version of the format whose readers understand how the matrices are stored."""
    found = [piece for matrix in matrices.values() for piece in (matrix.pieces or (matrix,))]
    if any(piece.scales.table for piece in found):
        return VERSION
    pieces = any(matrix.pieces for matrix in matrices.values())
    return SCALED if pieces or any(piece.scales != PAIRS for piece in found) else OLDEST


def quantization(scheme: str, matrices: dict[str, Matrix], report: WeightsReport) -> Quantization:
    """The manifest's `quantization`."""
    reasons = {dense["name"]: dense["reason"] for dense in report.dense}
    stored = tuple(
        StoredMatrix(
            name,
            m.n,
            m.k,
            m.bits,
            m.group,
            reasons.get(name),
            report.carried.get(name),
            _three_digits(report.changes.get(name)),
            m.scales,
            tuple(StoredRows(piece.n, piece.bits, piece.group, piece.scales) for piece in m.pieces),
        )
        for name, m in matrices.items()
    )
    method = report.method if any(m.quantized for m in matrices.values()) else "none"
    if report.rounded and method != "none":
        method += f"; {report.rounded:,} scales and biases rounded to float16"
    anew = sum(carried == "requantized" for carried in report.carried.values())
    if anew and report.method == KEPT:
        how = ", ".join(f"{was} becomes {becomes}" for was, becomes in report.anew)
        method += f"; {anew:,} matrices requantized by {METHOD}" + (f" ({how})" if how else "")
    return Quantization(scheme, method, stored)


def _three_digits(step: float | None) -> float | None:
    """Round a bound up to three digits, so that it stays a bound; None for None and 0."""
    if not step:
        return None
    digits = 2 - math.floor(math.log10(step))
    return math.ceil(step * 10.0**digits) / 10.0**digits


def provenance(checkpoint: Checkpoint, sha256: str, report: WeightsReport, keys: bool) -> dict[str, Any]:
    """The manifest's `provenance`: the checkpoint, and `skipped`, the number of tensors left out, by the part
    of the model that they belong to. With `keys`, also the calibration text of 4-bit keys.

    It has no times and no paths: the same input gives the same bytes.
    """
    made = {
        "nearfar": __version__,
        "tvm": tvm.__version__,
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": sha256,
    }
    if report.checkpoint_format is not None:
        made["checkpoint_format"] = report.checkpoint_format
    if keys and report.keys is not None:
        made["keys"] = report.keys
    return made | ({"skipped": report.skipped} if report.skipped else {})
