"""The operations after the sums of a matmul, on vectors of four columns: bias, gate, softcap, residual,
store.
"""

# mypy: ignore-errors
# TVMScript: what is written here are statements of the kernel that is being parsed.
from __future__ import annotations

from tvm.script import tirx as T

from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.kernels.activations import activated, capped
from nearfar.targets.gpu.kernels.common import f32, stored
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, at, joined

VALUES = 2 * WIDTH  # numbers of the local array that `epilogue` works in


def sides(job: Linear) -> int:
    """The number of matrix columns for one output column: a gated pair has a gate row and an up row."""
    return 2 if job.gate else 1


def epilogue(job: Linear, value, sums: list, bias, residual, out, row, column) -> None:
    """Finish and store four columns of a row: `sums` has the vector of each side, `column` counts vectors of
    the piece.

    `value` is a local array of VALUES: activations use their argument more than once.
    """
    column = column + job.first // WIDTH

    def biased(side: int, place: int):
        made = at(sums[side], place)
        across = job.columns // WIDTH
        return made + at(bias[side * across + column], place) if job.bias else made

    for place in range(WIDTH):
        T.buffer_store(value, biased(0, place), [place])
        if job.gate is not None:
            T.buffer_store(value, biased(1, place), [WIDTH + place])
        added = at(residual[row, column], place) if job.residual else None
        finish(job, value, place, value[WIDTH + place], added)
    made = [stored(value[place], job.out_dtype) for place in range(WIDTH)]
    T.buffer_store(out, joined(made), [row, column])


def finish(job: Linear, value, place: int, up, residual) -> None:
    """Apply gate, softcap and residual to value[place].

    `up`, `residual`: the factor and the addend, used only if the job has them.
    """
    made = value[place]
    if job.gate is not None:
        T.buffer_store(value, activated(job.gate, made) * up, [place])
    if job.softcap is not None:
        T.buffer_store(value, capped(made, job.softcap), [place])
    if job.residual:
        T.buffer_store(value, made + f32(residual), [place])
