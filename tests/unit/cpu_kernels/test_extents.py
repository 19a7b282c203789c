"""Kernels for many rows are one function for all numbers of rows; it reads the number from the shapes of its
arguments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

import tvm
from tvm import tirx

from nearfar.edge_runtime.executors.cpu.library import DlTensor, Library, aligned
from nearfar.kernels.jobs import Attend, Embed, Greedy, Linear, Logprobs, Norm, RopeAppend, Sample
from nearfar.kernels.quantized import Matrix
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import compile_library, compile_objects
from nearfar.targets.cpu.kernels import linear_panels
from nearfar.targets.cpu.kernels.extents import ROWS, closed, whole
from nearfar.targets.cpu.units import UNITS
from tests.support.cpu_jobs import HERE, OBJECTS

PAGED: tuple[Any, ...] = (8, 4, 64, 16, 2, 8, "float32", "float16")
Q4, F16 = Matrix(64, 128, 4, 64), Matrix(35, 64, 16)
OF_STEPS = [
    Embed(16, Q4), Embed(16, F16), Norm(16, 64, 1e-5), RopeAppend(16, *PAGED),
    Linear(16, Q4, "float32", "float32", norm=1e-5, residual=True, x_rows=16),
    Linear(16, F16, "float32", "float32", norm=1e-5, bias=True, x_rows=16),
    Linear(16, Matrix(22, 64, 32), "float32", "float32", gate="silu", x_rows=16),
]  # fmt: skip


def functions(job: Any, unit: Any = HERE) -> dict[str, tirx.PrimFunc]:
    named = [pair for pair in CpuKernels(unit).stages(job).named(job.label)]
    return {name: stage.func.with_attr("global_symbol", name) for name, stage in named}


def compiled(jobs: list[Any], folder: Any, unit: Any = HERE) -> tuple[int, int]:
    """The number of kernels, and the number of functions in the library."""
    module = tvm.IRModule({name: func for job in jobs for name, func in functions(job, unit).items()})
    made = compile_objects(module, unit, None, folder, keep=OBJECTS)
    assert len(made.files) + len(made.shared) == len(module.functions)
    return len(module.functions), len(made.files)


def rows_of(job: Any, rows: int) -> Any:
    return replace(job, m=rows, x_rows=rows) if isinstance(job, Linear) else replace(job, m=rows)


@pytest.mark.parametrize("job", OF_STEPS, ids=lambda job: job.label)
def test_steps_share_their_functions(job, tmp_path):
    """All kernels share functions; of matmuls, those of whole tiles do, and on units with another way for
    many rows, those of many rows.
    """
    kernels, once = compiled([job], tmp_path)
    panels = isinstance(job, Linear) and job.matrix.quantized and bool(linear_panels.tile_of(HERE, 32))
    many = compiled([rows_of(job, rows) for rows in (8, 16, 32, 64, 256)], tmp_path)
    assert many == (5 * kernels, once + panels)
    few = compiled([rows_of(job, rows) for rows in (1, 2, 4, 16)], tmp_path)
    assert few == (4 * kernels, (4 if isinstance(job, Linear) else 1) * once)


@pytest.mark.parametrize("unit", [unit for unit in UNITS.values() if unit.architecture == HERE.architecture])
def test_the_head_is_one_function_whatever_the_step(unit, tmp_path):
    heads = [
        Linear(16, Q4, "float32", "float32", norm=1e-5, rows=True, x_rows=rows) for rows in (16, 64, 256)
    ]
    assert compiled(heads, tmp_path, unit) == (3, 1)


def test_attention_shares_what_has_the_same_tasks(tmp_path):
    """A task with one row or several, and blocks that are distributed or not, are different code; all else is
    shared.
    """
    assert compiled([Attend(rows, *PAGED, scale=0.125) for rows in (1, 2)], tmp_path) == (2, 1)
    assert compiled([Attend(rows, *PAGED, scale=0.125) for rows in (64, 256)], tmp_path) == (2, 1)
    assert compiled([Attend(rows, *PAGED, scale=0.125) for rows in (1, 256)], tmp_path) == (2, 2)


@pytest.mark.parametrize(
    "job", [Greedy(1, 515), Sample(1, 515, 4), Logprobs(1, 515)], ids=lambda job: job.kind
)
def test_samplers_share_a_function(job, tmp_path):
    assert compiled([replace(job, rows=rows) for rows in (1, 4, 16)], tmp_path) == (3, 1)


def test_a_shared_function_computes_as_many_rows_as_its_arguments_have(tmp_path):
    jobs = {rows: Norm(rows, 64, 1e-5, weight=False) for rows in (1, 3, 16, 48, 256)}
    module = tvm.IRModule({name: func for job in jobs.values() for name, func in functions(job).items()})
    compile_library(module, tmp_path / "model.so", keep=OBJECTS)
    library = Library(tmp_path / "model.so")
    x = aligned((256, 64), np.dtype("float32"))
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    want = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    for rows, job in jobs.items():
        out = aligned(x.shape, x.dtype)
        out[...] = 7
        launch = (job.label, [DlTensor(x[:rows]), DlTensor(out[:rows])])
        library.pool(2).replay(library.bind([launch]))
        np.testing.assert_allclose(out[:rows], want[:rows], rtol=1e-5, atol=1e-6)
        assert (out[rows:] == 7).all()


def test_shapes_are_closed_over_rows_alone():
    rows, pages = tirx.Var(ROWS, "int32"), tirx.Var("pages", "int32")
    assert closed((rows // 8, 64, tirx.IntImm("int64", 3)), 64) == (8, 64, 3)
    assert closed((pages, rows), 16) == (None, 16)
    assert whole((rows, 5), 16) == (16, 5)
    with pytest.raises(AssertionError, match="other symbols than rows"):
        whole((pages, 5), 16)
