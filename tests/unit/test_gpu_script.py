"""Kernels become the PrimFuncs that TVM's own parser makes, and are made once for all targets."""

from __future__ import annotations

import ast
import runpy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import script as tvm_script
from tvm import tirx
from tvm.script import tirx as T

from nearfar.kernels.contract import Precision, Products
from nearfar.kernels.jobs import (
    Attend,
    Embed,
    Greedy,
    Job,
    Linear,
    Logprobs,
    Norm,
    RopeAppend,
    Rows,
    Sample,
)
from nearfar.kernels.quantized import Matrix
from nearfar.targets import gpu, vulkan, webgpu
from nearfar.targets.gpu import kernels as gpu_kernels
from nearfar.targets.gpu.classes import CLASSES, Tuning
from nearfar.targets.gpu.kernels.experts import experts_in_pieces
from nearfar.targets.gpu.kernels.script import text
from nearfar.targets.gpu.kernels.script.text import prim_func
from tests.support import gpu_jobs, project_jobs

SCALE = 3.0
PROGRAMS: dict[str, tuple[Precision, Products]] = {
    "software": ("f32", "float"), "mobile": ("f32", "int8"), "integrated": ("f32", "float"),
    "discrete": ("f16", "cooperative"),
}  # fmt: skip
"""One program of each device class: together they have every kind of kernel."""


def jobs(kernels: gpu.GpuKernels) -> Iterator[Job]:
    """Jobs of every kind, with options that select other branches of a script."""
    dtype = kernels.activations
    fused = gpu_jobs.linears(dtype)
    for name, m in (
        ("rows", 16),
        ("silu_bias", 1),
        ("gate_softcap", 4),
        ("norm", 64),
        ("relu2_residual", 64),
    ):
        yield fused[name](m)
    yield Linear(1, gpu_jobs.SCHEMES["q5g128"], dtype, dtype)
    yield Linear(33, gpu_jobs.MATRICES["f16odd"], "float32", "float32")
    yield Linear(64, gpu_jobs.MATRICES["q8g64"], dtype, "float32", norm=1e-5)
    yield Embed(4, gpu_jobs.SCHEMES["q3g64"], 24.0)
    yield gpu_jobs.NORMS["groups"]
    yield from (gpu_jobs.ROUTES["softmax"], gpu_jobs.ROUTES["sigmoid"])
    yield from (gpu_jobs.EXPERTS["clamped"], gpu_jobs.EXPERTS["f16odd"])
    yield from (gpu_jobs.STATES["conv_odd"], gpu_jobs.STATES["delta_few"], gpu_jobs.STATES["delta_odd"])
    yield from (gpu_jobs.STATES["ssm_few"], gpu_jobs.STATES["ssm_odd"])
    for kv_dtype in (dtype, "int8", "int4"):
        for m, flags in ((1, "all"), (64, "all"), (64, "plain")):
            job = gpu_jobs.paged(Attend, (m, 8, 2, 64), dtype, **gpu_jobs.ATTENDS[flags])
            yield replace(job, kv_dtype=kv_dtype)
        for flags in ("norms", "norm_all_after", "q"):
            appended = gpu_jobs.paged(RopeAppend, (4, 8, 2, 64), dtype, **gpu_jobs.ROPES[flags])
            yield replace(appended, kv_dtype=kv_dtype)
        projected = project_jobs.job((2, 4, 2, 64), dtype, norm_eps=1e-6)
        projected = replace(projected, paged=replace(projected.paged, kv_dtype=kv_dtype))
        if kernels.projects(projected):
            yield projected
            yield Rows.of(projected.paged)
    yield from parts(kernels)
    yield from (Greedy(4, 300), Sample(4, 300, 8), Logprobs(4, 300))


def parts(kernels: gpu.GpuKernels) -> Iterator[Job]:
    """Attention jobs whose parts the following matmul combines."""
    dtype = kernels.activations
    attend = gpu_jobs.paged(Attend, (1, 8, 2, 64), dtype)
    linear = Linear(1, Matrix(64, 512, 4, 64), dtype, "float32", residual=True)
    split = kernels.split(attend, linear)
    if split is not None:
        yield replace(attend, split=split)
        yield replace(linear, split=split, split_heads=attend.heads)


@pytest.fixture(scope="module")
def parsed() -> set[tuple[str, int]]:
    """File and line of the scripts that have been compared."""
    return set()


@pytest.mark.parametrize("device", PROGRAMS)
def test_a_kernel_is_what_tvm_makes_of_its_script(
    device: str, parsed: set[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are compared too, because code generators write them."""
    precision, products = PROGRAMS[device]
    kernels = gpu.GpuKernels(Tuning(CLASSES[device], precision == "f16", False, products))
    ours = text.made

    def made(func: Callable[..., None], names: dict[str, Any]) -> tirx.PrimFunc:
        parsed.add((func.__code__.co_filename, func.__code__.co_firstlineno))
        kernel = ours(func, names)
        expected = tvm_script.from_source(func, {**names, "prim_func": T.prim_func}, check_well_formed=False)
        tvm.ir.assert_structural_equal(kernel, expected)
        assert kernel.script() == expected.script()
        return kernel

    monkeypatch.setattr(text, "made", made)
    gpu._made.cache_clear()
    experts_in_pieces.cache_clear()
    for job in jobs(kernels):
        kernels.stages(job)
    in_pieces = gpu_jobs.in_pieces(kernels.activations)["gate"]
    gpu.GpuKernels(kernels.tuning, gpu_jobs.PIECE).stages(in_pieces)


def test_every_script_was_compared(parsed: set[tuple[str, int]]) -> None:
    if not parsed:
        pytest.skip("needs the test above")
    there = set()
    for path in Path(str(gpu_kernels.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                there |= {(str(path), each.lineno) for each in node.decorator_list if _is_ours(each)}
    assert there == parsed


def _is_ours(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "prim_func"


def test_names_are_those_of_the_module_of_the_maker_and_of_annotations() -> None:
    """Tests a global, a variable and a function of the maker, and a name that only annotations use."""
    count, only_annotated = 8, (8, "float32")
    shape, dtype = only_annotated

    def scaled(value: object) -> object:
        return value * T.float32(SCALE)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((shape,), dtype), out: T.Buffer((shape,), dtype)):
        for tx in T.thread_binding(count, thread="threadIdx.x"):
            out[tx] = scaled(a[tx])

    expected = kernel

    @prim_func
    def kernel(a: T.Buffer((shape,), dtype), out: T.Buffer((shape,), dtype)):
        for tx in T.thread_binding(count, thread="threadIdx.x"):
            out[tx] = scaled(a[tx])

    tvm.ir.assert_structural_equal(kernel, expected)


HEAD = """from __future__ import annotations

from tvm.script import tirx as T

from nearfar.targets.gpu.kernels.script.text import prim_func


@prim_func
def kernel(a: T.Buffer((8,), "int32"), out: T.Buffer((8,), "int32")):
    for tx in T.thread_binding(8, thread="threadIdx.x"):
        at: T.let = a[tx] // 2
"""


def kernel_of(folder: Path, body: str) -> tirx.PrimFunc:
    """The kernel of a script whose loop ends with the lines of `body`."""
    path = folder / "kernels.py"
    path.write_text(HEAD + "".join(f"        {line}\n" for line in body.splitlines()))
    return runpy.run_path(str(path))["kernel"]


EQUAL = {
    "numbers": "out[tx] = -1",
    "branches": "if at > 3 and (tx == 0 or not at < 2):\n    out[tx] = at\nelse:\n    out[tx] = 3",
    "known branches": "if 2 > 1:\n    out[tx] = at\nif not 2 > 1 and at.nothing:\n    out[tx] = 2",
    "known first": "if 2 > 1 and at > 0:\n    out[tx] = at\nif 0 or 2 > 1 or at.nothing:\n    out[tx] = 2",
    "choices": "out[tx] = at if at != 3 else tx\nout[tx] = 3 if 1 <= 2 else at.nothing",
    "names again": "for i in T.serial(2):\n    b: T.let = i + 1\nfor i in T.unroll(2):\n    b: T.let = i",
    "constants": "b: T.let = 3\nc: T.let = 0.5\nout[tx] = b + T.Cast('int32', c)",
    "alone": "'a docstring'\nT.tvm_storage_sync('shared')",
    "lists": "n = T.meta_var(4)\nout[tx] = [n + i for i in (1, 2)][1]",
}


@pytest.mark.parametrize("name", EQUAL)
def test_parts_of_the_language_are_as_in_tvm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(tmp_path, EQUAL[name])
    monkeypatch.setattr(text, "prim_func", T.prim_func(check_well_formed=False))
    expected = kernel_of(tmp_path, EQUAL[name])
    tvm.ir.assert_structural_equal(kernel, expected)
    assert kernel.script() == expected.script()


REFUSED = {
    "while at > 2:\n    out[tx] = 1": "no statement While",
    "out[tx] += 1": "no statement AugAssign",
    "with T.attr(0, 'a', 1):\n    out[tx] = 1": "no statement With",
    "return": "no statement Return",
    "for i, j in T.grid(2, 2):\n    out[tx] = 1": "a loop of a kernel is over one name",
    "for i in T.serial(2):\n    out[i] = 1\nelse:\n    out[tx] = 1": "has no else",
    "out[tx] = out[0] = 1": "is assigned at a time",
    "b, c = at, tx": "is assigned at a time",
    "b: T.int32 = 3": "T.int32 annotates a name",
    "b: T.let": "gives one name to a value",
    "at: T.let = 2": "at is bound already",
    "for tx in T.serial(2):\n    out[tx] = 1": "tx is bound already",
    "if at > 2:\n    b: T.let = 1\nout[tx] = b": "b is bound elsewhere",
    "out[tx] = 0 < at < 3": "two are compared at a time",
    "out[tx] = at in (1, 2)": "no comparison In",
    "out[tx] = a[0:2]": "no expression Slice",
    "out[tx] = (lambda: at)()": "no expression Lambda",
    "out[tx] = {1: at}[1]": "no expression Dict",
    "out[tx] = [i for i in (1, 2) if i > 1][0]": "without `if`",
    "out": "is an expression is a call",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_not_of_the_language_is_refused_by_line(body: str, tmp_path: Path) -> None:
    with pytest.raises(SyntaxError, match=r"nearfar/targets/gpu/kernels/script/parser\.py") as caught:
        kernel_of(tmp_path, "out[tx] = 0\n" + body)
    assert REFUSED[body] in str(caught.value)
    assert caught.value.filename == str(tmp_path / "kernels.py")
    first = HEAD.count("\n") + 2
    assert first <= (caught.value.lineno or 0) <= first + body.count("\n")


WRONG = {
    "for i in range(2):\n    out[tx] = i": "loops over T.serial",
    "b = at": "T.let names an expression",
    "b = 3": "T.let names an expression",
    "if 'a':\n    out[tx] = 1": "decides by a truth value or an expression",
    "T.int32(2)": "stands alone",
    "out[tx] = at < 0.5": "0.5 is compared with an expression of int32",
    "out[tx] = nothing": "name 'nothing' is not defined",
}
"""Lines that are valid syntax but have no meaning in a kernel, with their errors."""


@pytest.mark.parametrize("body", WRONG)
def test_what_goes_wrong_names_the_line_of_the_script(body: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, NameError), match=WRONG[body]) as caught:
        kernel_of(tmp_path, "out[tx] = 0\n" + body)
    lines = [
        frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename.endswith("kernels.py")
    ]
    assert lines[-1] == HEAD.count("\n") + 2


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ('a: T.Buffer((8,), "int32")', "a", "a has no annotation"),
        ("kernel(a", "kernel(*, a", "names and annotations, nothing else"),
        ("):\n    for", ") -> None:\n    for", "returns nothing"),
    ],
)
def test_a_kernel_has_parameters_with_annotations_and_nothing_else(
    before: str, after: str, wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(HEAD.replace(before, after))
    with pytest.raises(SyntaxError, match=wrong):
        runpy.run_path(str(path))


def test_programs_and_targets_share_the_kernels_that_are_the_same() -> None:
    half, full, *_ = (variant.kernels for variant in webgpu.VARIANTS)
    other = vulkan.VARIANTS[0].kernels
    for job in (Greedy(4, 300), Norm(4, 24, 1e-6)):
        assert half.stages(job) is full.stages(job) is other.stages(job)
    linear = Linear(1, Matrix(64, 1536, 8, 64), "float32", "float32")
    assert half.stages(linear) is full.stages(linear)
    assert half.stages(linear) is not other.stages(linear), "it loads words side by side"
