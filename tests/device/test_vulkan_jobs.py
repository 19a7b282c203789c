"""The GPU targets' kernels as SPIR-V against NumPy, on a Vulkan device; jobs as test_webgpu_kernels.py."""

from __future__ import annotations

import pytest

from nearfar.format.manifest import Float
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from nearfar.targets.jobs import Attend, Embed, GraphJob, Linear, RopeAppend
from nearfar.targets.kernels import Precision
from nearfar.targets.vulkan import VARIANTS
from tests.support import gpu_jobs, int8_jobs, vulkan_run

KERNELS = {variant.precision: variant.kernels for variant in VARIANTS if variant.device_class == "software"}


def check(job: GraphJob, precision: Precision) -> None:
    gpu_jobs.check(KERNELS[precision], vulkan_run.run, precision, job)


SCHEMES = (
    "q2g16",
    "q3g16",
    "q3g64",
    "q4g16",
    "q4g64",
    "q5g16",
    "q5g128",
    "q6g16",
    "q6g32",
    "q8g64",
    "q8g128",
)
MATRICES = {"f32odd": gpu_jobs.MATRICES["f32odd"], "f16odd": gpu_jobs.MATRICES["f16odd"]}
MATRICES |= {name: gpu_jobs.SCHEMES[name] for name in SCHEMES}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str) -> None:
    matrix = MATRICES[name]
    check(Linear(1, matrix, "float32", "float32"), "f32")
    check(Linear(16, matrix, "float16", "float16"), "f16")
    check(Embed(4, matrix, 3.0), "f32")


@pytest.mark.parametrize("variant", gpu_jobs.LINEARS)
def test_linear_variants(variant: str) -> None:
    for m, precision in ((1, "f16"), (4, "f32"), (64, "f32")):
        check(gpu_jobs.linears("float32" if precision == "f32" else "float16")[variant](m), precision)


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh", "gelu_erf", "relu2"])
@pytest.mark.parametrize("m", [1, 64])
def test_float16_stores_saturate(m: int, gate: gpu_jobs.Activation | None) -> None:
    gpu_jobs.check_saturation(KERNELS["f16"], vulkan_run.run, m, gate)


def test_activations_and_softcap() -> None:
    gpu_jobs.check_functions(KERNELS["f32"], vulkan_run.run)


@pytest.mark.parametrize("name", gpu_jobs.NORMS)
def test_norm(name: str) -> None:
    check(gpu_jobs.NORMS[name], "f32")


@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_head_sizes(shape: tuple[int, int, int, int]) -> None:
    check(gpu_jobs.paged(Attend, shape, "float32"), "f32")
    check(gpu_jobs.paged(RopeAppend, shape, "float16", norm_eps=1e-6), "f16")


@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_attention_flags(flags: str) -> None:
    """Pages that no row sees are not there: lavapipe would fault."""
    check(gpu_jobs.paged(Attend, (1, 8, 4, 8), "float32", **gpu_jobs.ATTENDS[flags]), "f32")
    check(gpu_jobs.paged(Attend, (16, 9, 3, 80), "float16", **gpu_jobs.ATTENDS[flags]), "f16")


@pytest.mark.parametrize("m", [1, 16])
def test_attention_of_32768_positions(m: int) -> None:
    check(gpu_jobs.long_attention(m, "float32"), "f32")
    check(gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS["all"]), "f32")


@pytest.mark.parametrize("flags", gpu_jobs.ROPES)
def test_rope_append_flags(flags: str) -> None:
    check(gpu_jobs.paged(RopeAppend, (4, 9, 3, 64), "float32", **gpu_jobs.ROPES[flags]), "f32")
    check(gpu_jobs.paged(RopeAppend, (16, 40, 2, 24), "float16", **gpu_jobs.ROPES[flags]), "f16")


@pytest.mark.parametrize(
    ("device", "name"), [(d, n) for d in gpu_jobs.GPU_CLASSES for n in gpu_jobs.class_linears(d)]
)
def test_linear_by_class(device: str, name: str) -> None:
    precision, job = gpu_jobs.class_linears(device)[name]
    gpu_jobs.check(variant(CLASSES[device], precision, True).kernels, vulkan_run.run, precision, job)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", gpu_jobs.UNEVEN)
def test_inputs_of_any_size(name: str, dtype: Float) -> None:
    """Nothing overflows in float16, and what is small is lost beside what is large in its own block only."""
    gpu_jobs.check_uneven(variant(CLASSES["discrete"], "f16", True).kernels, vulkan_run.run, name, dtype)


@pytest.mark.parametrize("device", ["software", "discrete"])
@pytest.mark.parametrize("name", gpu_jobs.in_pieces("float32"))
def test_matrices_in_pieces(device: str, name: str) -> None:
    precision: Precision = "f32" if device == "software" else "f16"
    kernels = variant(CLASSES[device], precision, True, binding=gpu_jobs.PIECE).kernels
    job = gpu_jobs.in_pieces(kernels.activations)[name]
    assert len(kernels.parts(job.matrix)) > 2 or not job.matrix.quantized
    gpu_jobs.check(kernels, vulkan_run.run, precision, job)


@pytest.mark.parametrize("device", gpu_jobs.GPU_CLASSES)
@pytest.mark.parametrize("name", int8_jobs.jobs("float32"))
def test_linear_of_bytes(device: str, name: str) -> None:
    precision, dtype = ("f16", "float16") if device == "discrete" else ("f32", "float32")
    kernels = variant(CLASSES[device], precision, True, "int8").kernels
    int8_jobs.check(kernels, vulkan_run.run, precision, int8_jobs.jobs(dtype)[name])


def test_bytes_of_no_number() -> None:
    int8_jobs.check_not_finite(variant(CLASSES["mobile"], "f32", True, "int8").kernels, vulkan_run.run)
