"""Matmuls of the CPU target against NumPy: all bits and groups, all that precedes and follows the product.

LLVM takes a quarter of a CPU second for a job, so a run compiles a third of them.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import gguf
import numpy as np
import pytest

pytest.importorskip("tvm")

from nearfar.errors import BuildError
from nearfar.format.scales import CODE_BITS, IQ4, OF_GGUF, PAIRS, SYMMETRIC
from nearfar.kernels.jobs import Activation, Linear
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu.kernels.dot import lines, turn
from nearfar.targets.cpu.packing import BlockLayout
from tests.support.cpu_jobs import KERNELS, CpuJobs, inputs_of
from tests.support.job_reference import ACTIVATIONS
from tests.support.scales import ODD, STORED_AS
from tests.support.turns import paired, share


def linear(m: int, matrix: Matrix, **options: Any) -> Linear:
    return Linear(m, matrix, "float32", "float32", **options)


def tolerance(job: Linear) -> float:
    """Activations of quantized matmuls have 16 bits, activations of dense ones 24."""
    return (2e-4 if job.matrix.quantized else 5e-6) * (3 if job.gate == "relu2" else 1)


PLAIN = share([
    *(linear(m, Matrix(48, 256, bits, group), norm=1e-5, residual=True)
      for bits in CODE_BITS for m, group in ((1, 16), (1, 32), (1, 64), (1, 128), (16, 16), (16, 64))),
    *(linear(m, Matrix(512, 192, bits, 64), norm=1e-5, residual=True)
      for bits in (4, 5, 8) for m in (4, 6, 64)),
    *(linear(m, Matrix(64, 172, bits), residual=True) for bits in (16, 32) for m in (1, 4, 16, 64)),
    linear(1, Matrix(35, 96, 3, 16), bias=True, residual=True), linear(4, Matrix(35, 96, 5, 16), bias=True),
], 3)  # fmt: skip
GATED = share([
    *(linear(m, matrix, norm=1e-6, gate=gate, **options)
      for gate in get_args(Activation)
      for m, matrix, options in (
          (1, Matrix(64, 64, 32), {}), (16, Matrix(64, 128, 4, 64), {"bias": True, "residual": True}),
          (4, Matrix(344, 64, 16), {"bias": True, "residual": True}), (1, Matrix(42, 128, 6, 32), {}))),
    linear(1, Matrix(344, 128, 8, 32), gate="silu", residual=True),
    linear(16, Matrix(22, 64, 32), gate="silu", bias=True),
], 3)  # fmt: skip
HEADS = share([
    linear(
        m,
        matrix,
        norm=1e-5,
        rows=True,
        x_rows=x_rows,
        softcap=softcap,
        bias=softcap is not None and matrix.bits > 8,
    )
    for m, x_rows in ((1, 1), (16, 64))
    for softcap in (None, 2.0)
    for matrix in (Matrix(64, 64, 32), Matrix(515, 64, 16), Matrix(515, 64, 4, 32), Matrix(64, 192, 8, 64))
], 3)  # fmt: skip
CAPPED = [
    linear(1, Matrix(32, 64, 32), softcap=0.5, residual=True),
    linear(1, Matrix(22, 64, 32), softcap=0.5, residual=True),
    linear(1, Matrix(64, 64, 4, 32), gate="gelu_tanh", softcap=0.5),
    linear(1, Matrix(42, 64, 4, 32), gate="silu", softcap=0.5),
]  # fmt: skip
SWEEP = [linear(1, Matrix(2 * 4096, 8, 32), gate=gate) for gate in get_args(Activation)]
CAP = linear(1, Matrix(4096, 8, 32), softcap=30.0)


STORED = share([
    *(linear(m, Matrix(n, 512, bits, group, scales=how), norm=1e-5, residual=True)
      for bits, group, how in STORED_AS for n, m in ((35, 1), (48, 16))),
    *(linear(m, Matrix(40, k, bits, group, scales=how), norm=1e-5)
      for (bits, group, k, how), m in paired(ODD, (1, 16))),
    linear(1, Matrix(48, 96, 5, 32, scales=SYMMETRIC)),
    linear(4, Matrix(16, 32, 8, 32, scales=SYMMETRIC), bias=True),
    linear(16, Matrix(64, 256, 4, 32, scales=STORED_AS[5][2]), gate="silu", bias=True),
    *(linear(m, Matrix.of([Matrix(40, 256, bits, group, scales=how) for bits, group, how in STORED_AS[-4:]]),
             norm=1e-5, bias=True) for m in (1, 16)),
    linear(1, Matrix.of([Matrix(24, 256, bits, group, scales=how) for bits, group, how in STORED_AS[:2]]),
           gate="silu", residual=True),
], 3)  # fmt: skip
MANY_ROWS = share([
    *(linear(m, Matrix(n, k, bits, group, scales=how), norm=1e-5, residual=True)
      for (bits, group, k, how), (n, m) in paired(
          [*((bits, group, 512, how) for bits, group, how in STORED_AS), *ODD,
           *((bits, 64, 192, PAIRS) for bits in CODE_BITS), (4, 32, 96, SYMMETRIC), (8, 16, 48, SYMMETRIC)],
          ((35, 32), (48, 64), (16, 288)))),
    linear(32, Matrix(96, 256, 4, 32, scales=STORED_AS[5][2]), gate="silu", bias=True, residual=True),
    linear(64, Matrix.of([Matrix(40, 256, bits, group, scales=how) for bits, group, how in STORED_AS[-4:]]),
           norm=1e-5, bias=True),
    linear(256, Matrix(80, 512, 6, 16, scales=STORED_AS[9][2])),
    *(linear(m, Matrix(40, 256, 5, 32), norm=1e-5) for m in (33, 34)),
], 3)  # fmt: skip
"""Products that unpack a span once for all rows (linear_panels.py), on units that do so; and products of
33 and 34 rows, which are not whole tiles.
"""
ONE_ROW = [
    linear(16, matrix, norm=1e-5, rows=True, x_rows=64, softcap=softcap)
    for matrix, softcap in ((Matrix(515, 192, 4, 64), None), (Matrix(64, 256, 6, 32), 2.0))
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    lists = (PLAIN, GATED, HEADS, CAPPED, SWEEP, [CAP], STORED, MANY_ROWS, ONE_ROW)
    return CpuJobs(tmp_path_factory.mktemp("linear"), [job for some in lists for job in some])


@pytest.mark.parametrize("job", ONE_ROW, ids=lambda job: job.label)
@pytest.mark.parametrize("places", [[63] * 16, [63] + [0] * 15, [5] * 15 + [6]], ids=["one", "two", "last"])
def test_a_head_that_wants_one_row_gives_all_rows(jobs, job, places):
    inputs = inputs_of(job, np.random.default_rng(3)) | {"logit_rows": np.array(places, np.int32)}
    jobs.check(job, inputs, tolerance(job))


@pytest.mark.parametrize(
    "job", [*PLAIN, *GATED, *HEADS, *CAPPED, *STORED, *MANY_ROWS], ids=lambda job: job.label
)
def test_linear(jobs, job):
    rng = np.random.default_rng(job.m * 1000 + job.matrix.n)
    inputs = inputs_of(job, rng)
    if job.norm is None:
        inputs["x"][0, 3] = 4
    jobs.check(job, inputs, tolerance(job))


def swept(job: Linear, values: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs with which output i is f(values[i]): the matrix holds the values, then ones to be gated."""
    w = np.zeros((job.matrix.n, 8), np.float32)
    w[:4096, 0], w[4096:, 0] = values, 1
    return {"x": np.eye(1, 8, dtype=np.float32), "w0": KERNELS.pack(job.matrix, w)[0]}


VALUES = np.concatenate(
    [np.linspace(-12, 12, 4086), [-1e30, -1e4, -60, -1e-30, 0, 1e-6, 60, 300, 1e4, 1e18]]
).astype(np.float32)


@pytest.mark.parametrize("job", SWEEP, ids=lambda job: job.gate)
def test_activations_are_those_of_float32(jobs, job):
    got = jobs.compute(job, swept(job, VALUES))["out"][0]
    wide = VALUES.astype(np.float64)
    with np.errstate(over="ignore"):
        want = ACTIVATIONS[job.gate](wide)
    np.testing.assert_allclose(got, want, rtol=3e-6 if job.gate == "relu2" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("job", [*SWEEP, CAP], ids=lambda job: job.gate or "softcap")
def test_what_is_not_finite_stays_so(jobs, job):
    values = np.zeros(4096, np.float32)
    values[[5, 2000]] = np.nan
    got = jobs.compute(job, swept(job, values))["out"][0]
    assert np.flatnonzero(np.isnan(got)).tolist() == [5, 2000]


def test_softcap_is_that_of_float32(jobs):
    """The softcap is exact close to 0 as well, where 1 − 2/(1 + e^2x) has few digits."""
    values = np.concatenate([np.linspace(-200, 200, 3000), np.geomspace(1e-6, 1e3, 1096)]).astype(np.float32)
    got = jobs.compute(CAP, swept(CAP, values))["out"][0]
    np.testing.assert_allclose(got, 30 * np.tanh(values.astype(np.float64) / 30), rtol=1e-6)


@pytest.mark.parametrize(
    ("bits", "group", "k", "how"),
    [
        *((bits, group, 512, how) for bits, group, how in STORED_AS),
        (3, 16, 512, PAIRS),
        (6, 128, 512, PAIRS),
        *ODD,
    ],
)
def test_a_kernel_reads_each_line_of_a_span_and_scales_of_a_superblock_first(bits, group, k, how):
    """With scales after the codes of a superblock, decode would lose two thirds of its speed."""
    layout = BlockLayout(Matrix(16, k, bits, group, scales=how))
    codes = [
        begin + i
        for cell in range(layout.span // layout.cell)
        for inside in range(layout.cell // group)
        for c in range(group // turn(layout.matrix))
        for begin, count in lines(layout, cell, inside, c)
        for i in range(count)
    ]
    scales = [layout.scale_start + i for i in range(layout.scale_lines)]
    assert (max(scales) < min(codes)) == bool(how.superblock)
    assert sorted({*codes, *scales}) == list(range(layout.lines))


@pytest.mark.parametrize("m", [1, 4, 16])
def test_few_rows_prefetch_their_weights(m):
    """From 8 rows on products take longer than reading, and lines are read more than once."""
    (stage,) = KERNELS.stages(linear(m, Matrix(16, 256, 4, 32, scales=OF_GGUF["Q4_K"]))).stages
    assert ("llvm.prefetch" in stage.func.script()) == (m < 8)


@pytest.mark.parametrize(("bits", "group", "how"), STORED_AS)
def test_packed_matrices_have_the_bytes_of_their_scheme(bits, group, how):
    """A superblock whose scales end in the middle of a line is padded by half a line, at most 2 %."""
    matrix = Matrix(32, 1024, bits, group, scales=how)
    (part,) = KERNELS.parts(matrix)
    assert matrix.bytes <= part.bytes <= matrix.bytes * 1.02
    layout = BlockLayout(matrix)
    if (layout.level_starts[-1] + layout.halves) % 2 == 0:
        assert part.bytes == matrix.bytes


def test_gguf_types_without_padding_have_the_bytes_of_the_file():
    for kind, how in IQ4.items():
        (part,) = KERNELS.parts(Matrix(32, 512, 4, 32, scales=how))
        weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert part.bytes == 32 * 512 // weights * size


@pytest.mark.parametrize("bits", CODE_BITS)
def test_packed_matrices_have_the_true_number_of_bits(bits):
    matrix = Matrix(32, 256, bits, 64)
    (part,) = KERNELS.parts(matrix)
    scales_and_biases = 2 * 16 * matrix.n * matrix.k // matrix.group
    assert math.prod(part.shape) * 32 == matrix.n * matrix.k * bits + scales_and_biases


def test_half_precision_is_refused():
    with pytest.raises(BuildError, match="float32 activations only, not float16 to float32"):
        KERNELS.stages(Linear(1, Matrix(16, 16, 32), "float16", "float32"))
