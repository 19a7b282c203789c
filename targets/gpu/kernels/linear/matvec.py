"""Matrix times few rows (decode) on a GPU: speed depends on the number of bytes of the matrix in flight.

The loop is that of sums.py; this module has the columns of a job's output (for a gated pair two of the
matrix) and the operations after the sums. Rows of attention in parts are joined first (combine.py).

If there are more rows than a lane has registers for, they are divided into groups. Each group has its own
workgroups, which read the matrix again. Workgroups with the same columns are neighbours in the launch, so
that one fetch serves all.
"""

# mypy: ignore-errors
# TVMScript: what looks like Python is parsed, and nested ifs separate build time from run time.
from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.jobs import Linear
from nearfar.targets.gpu.classes import DeviceClass, Tuning
from nearfar.targets.gpu.kernels.attention.combine import Gathered, gathered_bytes
from nearfar.targets.gpu.kernels.common import ceil_div, select
from nearfar.targets.gpu.kernels.linear.epilogue import VALUES, epilogue, sides
from nearfar.targets.gpu.kernels.linear.layout import params
from nearfar.targets.gpu.kernels.linear.sums import (
    LANES,
    LaneColumns,
    Product,
    Sums,
    rows_of,
    shared_bytes,
    tiling,
)
from nearfar.targets.gpu.kernels.linear.tiled import Tiled
from nearfar.targets.gpu.kernels.script.text import prim_func
from nearfar.targets.gpu.kernels.script.vectors import WIDTH, of_numbers, quarter

# Rows of vectors: at 7 a thread holds 185 registers, and Chromium compiles the shader for two minutes.
VECTOR_ROWS = 4
# A matmul of 16 rows with fewer threads than a class wants, divided by this, waits longer for memory than a
# matvec computes (docs/decisions/0015).
WAITING = 4


def takes(job: Linear, device: DeviceClass) -> bool:
    """Whether a matvec takes the job: it works in groups of rows if a matmul's tiles would leave the device
    idle.
    """
    if not VECTOR_ROWS < job.m <= device.grouped_rows:
        return job.m <= VECTOR_ROWS
    tile = Tiled.over(job, device, device.tile[1])
    return ceil_div(job.columns // WIDTH, tile.lanes) * tile.threads < device.launched // WAITING


def groups(job: Linear) -> int:
    """The number of groups of rows, each of which reads the matrix."""
    return ceil_div(job.m, VECTOR_ROWS)


def workgroups(job: Linear) -> int:
    """The number of workgroups for a group of rows."""
    return ceil_div(job.columns // WIDTH, LANES)


def room(job: Linear, device: DeviceClass, shared: int) -> bool:
    """Whether `shared` bytes fit into workgroup memory together with the sums of all lanes."""
    product = _product(job)
    return shared_bytes(product, tiling(product, device).splits) + shared <= device.shared_bytes


def _product(job: Linear) -> Product:
    across = job.columns // WIDTH

    def place(bx, tx, side):
        column = bx * LANES + tx
        return (T.min(column, across - 1) if across % LANES else column) + side * across

    shared = gathered_bytes(job, job.split, job.split_heads) if job.split is not None else 0
    columns = LaneColumns(workgroups(job), place, sides(job))
    return Product(ceil_div(job.m, groups(job)), job.x_dtype, job.matrix, columns, job.norm, shared)


def matvec(job: Linear, tuning: Tuning) -> tirx.PrimFunc:
    """The launch of a job that `takes` accepts; rows and columns are whole vectors (vectors.fits)."""
    m, k, across, count = job.m, job.matrix.k, job.columns // WIDTH, groups(job)
    sums = Sums(_product(job), tuning)
    each = sums.job.m  # rows of a group
    ragged_m, ragged_n = m % each != 0, across % LANES != 0
    gathered = Gathered(job) if job.split is not None else None
    parts_shape = gathered.shape if gathered is not None else (1, 1, 1, 1)

    @prim_func
    def kernel(
        x: T.Buffer((job.x_rows or m, k // WIDTH), f"{job.x_dtype}x{WIDTH}"),
        partial: T.Buffer(parts_shape, f"{job.x_dtype}x{WIDTH}"),
        positions: T.Buffer((MAX_STEP,), "int32"),
        sinks: T.Buffer((job.split_heads or 1,), "float32"),
        logit_rows: T.Buffer((MAX_ROWS,), "int32"),
        norm: T.Buffer((k // WIDTH,), f"float32x{WIDTH}"),
        w0: T.Buffer(*sums.words),
        w1: T.Buffer(*sums.scales),
        bias: T.Buffer(quarter((job.of or job.matrix.n,)), f"float32x{WIDTH}"),
        residual: T.Buffer(quarter((m, job.width)), f"{job.out_dtype}x{WIDTH}"),
        out: T.Buffer(quarter(job.out[0]), f"{job.out_dtype}x{WIDTH}"),
    ):
        for bx in T.thread_binding(workgroups(job) * count, thread="blockIdx.x"):
            for ty in T.thread_binding(sums.splits, thread="threadIdx.y"):
                for tx in T.thread_binding(LANES, thread="threadIdx.x"):
                    column = T.meta_var(bx // count * LANES + tx)
                    first = T.meta_var(bx % count * each)
                    held = T.meta_var(sums.memory())
                    value = T.alloc_local((VALUES,), "float32")
                    row = T.alloc_local((each,), "int32")
                    for i in T.unroll(each):
                        place = T.meta_var(T.min(first + i, m - 1) if ragged_m else first + i)
                        row[i] = logit_rows[place] if job.rows else place
                    if gathered is None:
                        sums.add(held, rows_of(x, row), norm, w0, w1, bx // count, ty, tx)
                    else:
                        rows = T.meta_var(gathered.memory())
                        gathered.gather(rows, partial, positions, sinks, ty * LANES + tx, sums.splits * LANES)
                        sums.add(held, gathered.rows(rows), norm, w0, w1, bx // count, ty, tx)
                    for r in T.unroll(sums.own):
                        own = T.meta_var(sums.row(r, ty))
                        inside = T.meta_var((own < each) & (first + own < m) if ragged_m else own < each)
                        if inside and (not ragged_n or column < across):
                            epilogue(
                                job, value, sums.finish(held, r, ty, tx), bias, residual, out,
                                first + own, column,
                            )  # fmt: skip

    return of_numbers(select(kernel, params(job), "matvec"))
