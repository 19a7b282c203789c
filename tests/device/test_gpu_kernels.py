"""Every kernel of the GPU targets against NumPy, as WGSL through wgpu and as SPIR-V through Vulkan.

Without a GPU both run on lavapipe, where LLVM's compilation of a kernel costs most: 0.3 to 1.8 CPU seconds.
So each case runs once in each run of the tests. Its combinations with targets, precisions and rows that the
same kind of kernel takes run in turns.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from nearfar.format.manifest import Float
from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Activation, Attend, Embed, GraphJob, Linear, RopeAppend
from nearfar.targets.gpu.packing import HELD
from tests.support import gguf_rows, gpu_checks, gpu_inputs, gpu_jobs, int8_jobs, job_reference
from tests.support.turns import in_turns

from .gpu_harness import BINDING, DTYPES, PRECISIONS, TARGETS, about, kernels, runner

ROWS = {"few": (1, 4), "many": (16, 64)}
"""Rows of a matmul by the kind of kernel that takes them: a matvec, tiles."""
KINDS = pytest.mark.parametrize("rows", ROWS)
WHICH = pytest.mark.parametrize("which", [0, 1])


def check(job: GraphJob, target: str, precision: Precision) -> None:
    gpu_checks.check(kernels(target, precision), runner(target), precision, job)


NAMED = gpu_jobs.MATRICES | gpu_jobs.SCHEMES
MATRICES = {f"{name}-{matrix.n}x{matrix.k}": matrix for name, matrix in (NAMED | gpu_jobs.STORED).items()}


@in_turns("target", "precision", "m")
@TARGETS
@PRECISIONS
@pytest.mark.parametrize("m", [1, 16, 4, 64])
@pytest.mark.parametrize("matrix", MATRICES)
def test_matrices(matrix: str, m: int, precision: Precision, target: str) -> None:
    check(Linear(m, MATRICES[matrix], DTYPES[precision], DTYPES[precision]), target, precision)


@in_turns("target", "scale")
@TARGETS
@pytest.mark.parametrize("scale", [1.0, 2304**0.5])
@pytest.mark.parametrize("matrix", NAMED)
def test_embed(matrix: str, scale: float, target: str) -> None:
    check(Embed(4, NAMED[matrix], scale), target, "f32")


@in_turns("target", "blocks")
@TARGETS
@pytest.mark.parametrize("blocks", [1, 5, 6])
@pytest.mark.parametrize("kind", gguf_rows.OWN_BYTES)
def test_rows_of_a_gguf_file_are_those_of_the_file(kind: str, blocks: int, target: str) -> None:
    """The rows are to the bit those of the gguf package, also of an odd number of columns or superblocks."""
    made, job = kernels(target, "f32"), gguf_rows.embed_job(kind, blocks * gguf_rows.block_size(kind), HELD)
    arrays, expected = gguf_rows.embed_arrays(made, kind, job.matrix)
    arrays["out"] = np.zeros(*job.out)
    np.testing.assert_array_equal(runner(target)(made.stages(job), "f32", arrays)["out"], expected)


@in_turns("rows", "target", "precision", "which")
# on top, so that neighbours among the variants, which share flags, differ in the kind, and a run has both
# kinds
@KINDS
@TARGETS
@PRECISIONS
@WHICH
@pytest.mark.parametrize("variant", gpu_jobs.LINEARS)
def test_linear_variants(variant: str, rows: str, which: int, precision: Precision, target: str) -> None:
    check(gpu_jobs.linears(DTYPES[precision])[variant](ROWS[rows][which]), target, precision)


@in_turns("m", "target")
@pytest.mark.parametrize("m", [1, 64])
@TARGETS
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh", "gelu_erf", "relu2"])
def test_float16_stores_saturate(m: int, gate: Activation | None, target: str) -> None:
    gpu_checks.check_saturation(kernels(target, "f16"), runner(target), m, gate)


@in_turns("target")
@TARGETS
def test_activations_and_softcap(target: str) -> None:
    gpu_checks.check_functions(kernels(target, "f32"), runner(target))


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("name", gpu_jobs.NORMS)
def test_norm(name: str, target: str) -> None:
    check(gpu_jobs.NORMS[name], target, "f32")


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("name", [*gpu_jobs.ROUTES, *gpu_jobs.EXPERTS])
def test_experts(name: str, target: str) -> None:
    job: GraphJob = {**gpu_jobs.ROUTES, **gpu_jobs.EXPERTS}[name]
    check(job, target, "f32")


@in_turns("target", "device")
@TARGETS
@pytest.mark.parametrize("device", ["software", "discrete"])
@pytest.mark.parametrize("name", gpu_jobs.STATES)
def test_states(name: str, device: str, target: str) -> None:
    gpu_checks.check(kernels(target, "f32", device), runner(target), "f32", gpu_jobs.STATES[name])


HEADS = {"few": ((1, 8, 4, 8), (4, 9, 3, 64)), "many": ((16, 4, 1, 80), (16, 9, 3, 80))}


@in_turns("rows", "target", "precision", "which")
@KINDS
@TARGETS
@PRECISIONS
@WHICH
@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_attention_flags(flags: str, rows: str, which: int, precision: Precision, target: str) -> None:
    """Pages that no row sees do not exist: reading one would make lavapipe fault."""
    shape = HEADS[rows][which]
    check(gpu_jobs.paged(Attend, shape, DTYPES[precision], **gpu_jobs.ATTENDS[flags]), target, precision)


@in_turns("flags", "target")
@pytest.mark.parametrize("flags", ["plain", "all"])
@TARGETS
@pytest.mark.parametrize("m", [1, 4, 16])
def test_attention_of_32768_positions(m: int, flags: str, target: str) -> None:
    check(gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS[flags]), target, "f32")


@in_turns("target", "precision", "norm_eps")
@TARGETS
@PRECISIONS
@pytest.mark.parametrize("norm_eps", [None, 1e-6])
@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_rope_append(
    shape: tuple[int, int, int, int], norm_eps: float | None, precision: Precision, target: str
) -> None:
    check(gpu_jobs.paged(RopeAppend, shape, DTYPES[precision], norm_eps=norm_eps), target, precision)


@in_turns("target", "precision", "shape")
@TARGETS
@PRECISIONS
@pytest.mark.parametrize("shape", [(1, 8, 4, 8), (4, 9, 3, 64), (16, 40, 2, 24)], ids=str)
@pytest.mark.parametrize("flags", gpu_jobs.ROPES)
def test_rope_append_flags(
    flags: str, shape: tuple[int, int, int, int], precision: Precision, target: str
) -> None:
    job = gpu_jobs.paged(RopeAppend, shape, DTYPES[precision], **gpu_jobs.ROPES[flags])
    check(job, target, precision)


def check_of_class(name: str, device: str, target: str) -> None:
    precision, job = gpu_jobs.class_linears(device)[name]
    gpu_checks.check(kernels(target, precision, device), runner(target), precision, job)


@in_turns("rows", "target", "device")
@pytest.mark.parametrize("rows", ["", "_rows"])
@TARGETS
@pytest.mark.parametrize("device", ["integrated", "discrete"])
@pytest.mark.parametrize("variant", gpu_jobs.LINEARS)
def test_linear_variants_by_class(variant: str, device: str, rows: str, target: str) -> None:
    check_of_class(variant + rows, device, target)


@in_turns("target", "device")
@TARGETS
@pytest.mark.parametrize("device", ["integrated", "discrete"])
@pytest.mark.parametrize(
    "name", [n for n in gpu_jobs.FUSED if n.removesuffix("_rows") not in gpu_jobs.LINEARS]
)
def test_what_is_fused_by_class(name: str, device: str, target: str) -> None:
    check_of_class(name, device, target)


OF_ONE_CLASS = [
    (d, n) for d in gpu_jobs.GPU_CLASSES for n in gpu_jobs.class_linears(d) if n not in gpu_jobs.FUSED
]


@in_turns("name", "target")
@TARGETS
@pytest.mark.parametrize(
    ("device", "kind", "name"), [(d, n.removesuffix("_rows"), n) for d, n in OF_ONE_CLASS]
)
def test_linear_by_class(device: str, kind: str, name: str, target: str) -> None:
    """A run takes one case of each kind, with few rows or with many."""
    check_of_class(name, device, target)


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_inputs_of_any_size(dtype: Float, target: str) -> None:
    """Nothing overflows in float16, and small values are lost beside large ones in their own block only."""
    for name in gpu_checks.UNEVEN:
        with about(name):
            gpu_checks.check_uneven(kernels(target, "f16", "discrete"), runner(target), name, dtype)


@in_turns("target", "device")
@TARGETS
@pytest.mark.parametrize("device", ["software", "discrete"])
@pytest.mark.parametrize("name", gpu_jobs.in_pieces("float32"))
def test_matrices_in_pieces(name: str, device: str, target: str) -> None:
    precision: Precision = "f32" if device == "software" else "f16"
    made = kernels(target, precision, device, binding=gpu_jobs.PIECE)
    job = gpu_jobs.in_pieces(made.activations)[name]
    assert len(made.parts(job.matrix)) > 2 or not job.matrix.quantized
    gpu_checks.check(made, runner(target), precision, job)


@in_turns("target", "device")
@TARGETS
@pytest.mark.parametrize("device", gpu_jobs.GPU_CLASSES)
@pytest.mark.parametrize("name", int8_jobs.jobs("float32"))
def test_linear_of_bytes(name: str, device: str, target: str) -> None:
    precision: Precision = "f16" if device == "discrete" else "f32"
    made = kernels(target, precision, device, "int8")
    int8_jobs.check(made, runner(target), precision, int8_jobs.jobs(DTYPES[precision])[name])


@in_turns("target")
@TARGETS
@pytest.mark.parametrize("name", gpu_jobs.CUT_EXPERTS)
def test_stacks_of_experts_in_pieces(name: str, target: str) -> None:
    """The outputs are to the bit those of whole stacks; rows also choose no expert."""
    job, outs = gpu_jobs.CUT_EXPERTS[name], []
    limit = 3 * job.gate_up.each.n * job.k * job.gate_up.bits // 8
    for binding in (limit, BINDING):
        made = kernels(target, "f32", binding=binding)
        arrays = gpu_inputs.inputs(made, job, np.random.default_rng(1))
        arrays["route"][1, 1] = -1
        gpu_checks.check(made, runner(target), "f32", job, arrays=dict(arrays))
        arrays["out"] = np.zeros(*job.out)
        given = {key: array for key, array in arrays.items() if key not in job_reference.PLAIN}
        outs.append(runner(target)(made.stages(job), "f32", given)["out"])
        launches = [stage.args for stage in made.stages(job).stages]
        assert sum("x" in args for args in launches) == (3 if binding == limit else 1)
    np.testing.assert_array_equal(*outs)


@in_turns("target")
@TARGETS
def test_bytes_of_no_number(target: str) -> None:
    int8_jobs.check_not_finite(kernels(target, "f32", "mobile", "int8"), runner(target))


def test_no_number_in_a_shader_is_one_that_gpus_take_for_0() -> None:
    """TVM writes seven digits: 2^-126 came out below the least normal number, and 0 divided by it was NaN."""
    from . import webgpu_harness

    staged = kernels("webgpu", "f32", "mobile", "int8").stages(int8_jobs.jobs("float32")["norm"])
    for shader in webgpu_harness.compile_staged(staged, "f32"):
        numbers = [float(number) for number in re.findall(r"(\d[\d.]*e-\d+)f", shader.source)]
        assert all(number >= 2.0**-126 for number in numbers)
