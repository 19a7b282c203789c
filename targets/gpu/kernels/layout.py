"""What both linear kernels (matvec, matmul) know of a job: parameters, matrix layout, row order of a gated pair."""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.targets.gpu.packing import parts
from nearfar.targets.jobs import Linear

from .common import f32, high_half, low_half


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


def neighbours(job: Linear, outputs: int, wanted: bool) -> int:
    """How many columns side by side a thread has: 4 where they are wanted and the matrix and the thread's share allow, else 1."""
    return 4 if wanted and outputs % 4 == 0 and columns(job) % 4 == 0 else 1


def column_of(bx, tx, output, lanes: int, outputs: int, beside: int):
    """Column of a thread's output: columns of neighbouring threads are neighbours, `beside` columns of a thread together."""
    return bx * (lanes * outputs) + output // beside * (lanes * beside) + tx * beside + output % beside


def loaded_column(bx, tx, output, lanes: int, outputs: int, beside: int, last: int | None):
    """The same, at most `last` (None: no column is beyond it); groups of neighbours are moved as a whole."""
    column = column_of(bx, tx, output, lanes, outputs, beside)
    if last is None:
        return column
    return T.min(column - output % beside, last + 1 - beside) + output % beside


def word_shape(job: Linear) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the array that holds codes or values."""
    part = parts(job.matrix)[0]
    return part.shape, part.dtype


def scale_shape(job: Linear) -> tuple[int, ...]:
    """Shape of the scale and bias words (a dummy for dense matrices, whose kernels have no such parameter)."""
    return parts(job.matrix)[1].shape if job.matrix.quantized else (1, 1)


def dense_element(word, bits: int, e):
    """Element `e` (may be symbolic) of a dense matrix's word, as float32: the word itself, or one half of it."""
    return word if bits == 32 else T.Select(e % 2 == 0, low_half(word), high_half(word))


def placed_code(word, bits: int, e):
    """Code `e` (may be symbolic) of a word, masked but not shifted down, as float32: code * 2^(bits*e).

    The top code is packed with its sign bit inverted (see packing), so it gives (code - 2^(bits-1)) * 2^(bits*e). SwiftShader
    shifts vectors one lane after the other, some twenty instructions; masking and converting from int32 take one each.
    """
    mask = T.shift_left(T.uint32((1 << bits) - 1), T.Cast("uint32", e * bits))
    return f32(T.Cast("int32", word & mask))


def place_factor(bits: int, e):
    """2^-(bits*e), which an input is multiplied by before it meets placed_code(…, e); by its float32 bits, as `e` may be symbolic."""
    return T.reinterpret("float32", (127 - bits * e) * (1 << 23))


def top_code_offset(bits: int) -> float:
    """What the top code of a word is short of: 2^(bits-1)."""
    return float(1 << (bits - 1))


def silu(value):
    """X * sigmoid(x)."""
    return value / (T.float32(1) + T.exp(-value))
