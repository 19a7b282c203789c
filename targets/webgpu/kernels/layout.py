"""What both linear kernels (matvec, matmul) know of a job: parameters, matrix layout, row order of a gated pair."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.targets.base import Linear
from nearfar.targets.webgpu.packing import parts

from .common import f32, half_to_float


def params(job: Linear) -> list[str]:
    """The job's parameter names in order (see nearfar.targets.base.Linear)."""
    names = ["x"]
    names += ["logit_rows"] if job.rows else []
    names += ["norm"] if job.norm is not None else []
    names += [f"w{i}" for i in range(len(parts(job.matrix)))]
    names += ["bias"] if job.bias else []
    names += ["residual"] if job.residual else []
    return [*names, "out"]


def columns(job: Linear) -> int:
    """Output columns."""
    return job.matrix.n // 2 if job.gated else job.matrix.n


def lanes_for(outputs: int, each: int) -> int:
    """Threads along the output, where a thread has `each` columns: as wide as wastes under a tenth of the last workgroup."""
    for lanes in (32, 16):
        if -(-outputs // (lanes * each)) * lanes * each <= outputs * 1.1:
            return lanes
    return 8


def word_shape(job: Linear) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the array that holds codes or values."""
    part = parts(job.matrix)[0]
    return part.shape, part.dtype


def scale_shape(job: Linear) -> tuple[int, ...]:
    """Shape of the scale and bias words (a dummy for dense matrices, whose kernels have no such parameter)."""
    return parts(job.matrix)[1].shape if job.matrix.quantized else (1, 1)


def element(word, bits: int, e):
    """Element `e` (may be symbolic) of consecutive words, as float32: a code, or the value of a dense matrix."""
    if bits == 32:
        return word[e]
    per_word = 32 // bits
    shifted = (word[0] if isinstance(word, list) else word[e // per_word]) >> T.Cast("uint32", e % per_word * bits)
    if bits == 16:
        return half_to_float(shifted)
    return f32(T.Cast("int32", shifted & T.uint32((1 << bits) - 1)))


def silu(value):
    """X * sigmoid(x)."""
    return value / (T.float32(1) + T.exp(-value))
