"""Every WebGPU kernel against NumPy, through wgpu (lavapipe on a machine without a GPU)."""

from __future__ import annotations

import re

import pytest

from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from nearfar.targets.jobs import Attend, Embed, Linear, RopeAppend
from nearfar.targets.webgpu import VARIANTS
from tests.support import gpu_jobs, int8_jobs

from . import webgpu_harness as harness

KERNELS = {variant.precision: variant.kernels for variant in VARIANTS if variant.device_class == "software"}

PRECISIONS = pytest.mark.parametrize("precision", ["f32", "f16"])


def check(job, precision):
    gpu_jobs.check(KERNELS[precision], harness.run, precision, job)


@pytest.mark.parametrize(
    ("matrix", "precision"),
    [*((name, "f32") for name in gpu_jobs.MATRICES), ("q4g64", "f16"), ("q8g32", "f16"), ("f16odd", "f16")],
)
@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_linear(matrix, m, precision):
    dtype = KERNELS[precision].activations
    check(Linear(m, gpu_jobs.MATRICES[matrix], dtype, dtype), precision)


@pytest.mark.parametrize("scheme", gpu_jobs.SCHEMES)
def test_bits_and_groups(scheme):
    for m in (1, 4, 16):
        check(Linear(m, gpu_jobs.SCHEMES[scheme], "float32", "float32"), "f32")
    check(Embed(4, gpu_jobs.SCHEMES[scheme]), "f32")


@PRECISIONS
@pytest.mark.parametrize("variant", gpu_jobs.LINEARS)
@pytest.mark.parametrize("m", [1, 4, 64])
def test_linear_variants(variant, m, precision):
    check(gpu_jobs.linears(KERNELS[precision].activations)[variant](m), precision)


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh", "gelu_erf", "relu2"])
@pytest.mark.parametrize("m", [1, 64])
def test_float16_stores_saturate(m, gate):
    gpu_jobs.check_saturation(KERNELS["f16"], harness.run, m, gate)


def test_activations_and_softcap():
    gpu_jobs.check_functions(KERNELS["f32"], harness.run)


@pytest.mark.parametrize("scale", [1.0, 2304**0.5])
@pytest.mark.parametrize("matrix", gpu_jobs.MATRICES)
def test_embed(matrix, scale):
    check(Embed(4, gpu_jobs.MATRICES[matrix], scale), "f32")


@pytest.mark.parametrize("name", gpu_jobs.NORMS)
def test_norm(name):
    check(gpu_jobs.NORMS[name], "f32")


@PRECISIONS
@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_attention(shape, precision):
    check(gpu_jobs.paged(Attend, shape, KERNELS[precision].activations), precision)


@pytest.mark.parametrize("flags", gpu_jobs.ATTENDS)
def test_attention_flags(flags):
    for shape, precision in (((1, 8, 4, 8), "f32"), ((4, 9, 3, 64), "f16"), ((16, 4, 1, 80), "f32")):
        dtype = KERNELS[precision].activations
        check(gpu_jobs.paged(Attend, shape, dtype, **gpu_jobs.ATTENDS[flags]), precision)


@pytest.mark.parametrize("flags", ["plain", "all"])
@pytest.mark.parametrize("m", [1, 4, 16])
def test_attention_of_32768_positions(m, flags):
    check(gpu_jobs.long_attention(m, "float32", **gpu_jobs.ATTENDS[flags]), "f32")


@PRECISIONS
@pytest.mark.parametrize("norm_eps", [None, 1e-6])
@pytest.mark.parametrize("shape", gpu_jobs.SHAPES, ids=str)
def test_rope_append(shape, norm_eps, precision):
    check(gpu_jobs.paged(RopeAppend, shape, KERNELS[precision].activations, norm_eps=norm_eps), precision)


@pytest.mark.parametrize("flags", gpu_jobs.ROPES)
def test_rope_append_flags(flags):
    for shape, precision in (((1, 8, 4, 8), "f16"), ((16, 40, 2, 24), "f32")):
        dtype = KERNELS[precision].activations
        check(gpu_jobs.paged(RopeAppend, shape, dtype, **gpu_jobs.ROPES[flags]), precision)


@pytest.mark.parametrize(
    ("device", "name"), [(d, n) for d in gpu_jobs.GPU_CLASSES for n in gpu_jobs.class_linears(d)]
)
def test_linear_by_class(device, name):
    precision, job = gpu_jobs.class_linears(device)[name]
    gpu_jobs.check(variant(CLASSES[device], precision, False).kernels, harness.run, precision, job)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", gpu_jobs.UNEVEN)
def test_inputs_of_any_size(name, dtype):
    """Nothing overflows in float16, and what is small is lost beside what is large in its own block only."""
    gpu_jobs.check_uneven(variant(CLASSES["discrete"], "f16", False).kernels, harness.run, name, dtype)


@pytest.mark.parametrize("device", ["software", "discrete"])
@pytest.mark.parametrize("name", gpu_jobs.in_pieces("float32"))
def test_matrices_in_pieces(device, name):
    precision = "f32" if device == "software" else "f16"
    kernels = variant(CLASSES[device], precision, False, binding=gpu_jobs.PIECE).kernels
    job = gpu_jobs.in_pieces(kernels.activations)[name]
    assert len(kernels.parts(job.matrix)) > 2 or not job.matrix.quantized
    gpu_jobs.check(kernels, harness.run, precision, job)


@pytest.mark.parametrize("device", gpu_jobs.GPU_CLASSES)
@pytest.mark.parametrize("name", int8_jobs.jobs("float32"))
def test_linear_of_bytes(device, name):
    precision, dtype = ("f16", "float16") if device == "discrete" else ("f32", "float32")
    kernels = variant(CLASSES[device], precision, False, "int8").kernels
    int8_jobs.check(kernels, harness.run, precision, int8_jobs.jobs(dtype)[name])


def test_no_number_in_a_shader_is_one_that_gpus_take_for_0():
    """TVM writes seven digits: 2^-126 was below the least normal number, and 0 divided by it NaN."""
    kernels = variant(CLASSES["mobile"], "f32", False, "int8").kernels
    staged = kernels.stages(int8_jobs.jobs("float32")["norm"])
    for shader in harness.compile_staged(staged, "f32"):
        numbers = [float(number) for number in re.findall(r"(\d[\d.]*e-\d+)f", shader.source)]
        assert all(number >= 2.0**-126 for number in numbers)


def test_bytes_of_no_number():
    int8_jobs.check_not_finite(variant(CLASSES["mobile"], "f32", False, "int8").kernels, harness.run)
