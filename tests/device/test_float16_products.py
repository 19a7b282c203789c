"""Matmuls of float16 programs, whose products are float16: how results are rounded, and that no input
overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from nearfar.format.scales import IQ4, PAIRS, Scales
from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Linear
from nearfar.kernels.quantized import Matrix, QuantTensor, values_of
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from tests.support import gpu_checks, gpu_inputs
from tests.support.job_reference import reference
from tests.support.turns import in_turns

Array = np.ndarray[Any, Any]
ROWS = 33
MATRICES = {
    "q4g64": Matrix(136, 1024, 4, 64),
    "q2g32": Matrix(136, 512, 2, 32),
    "q3g16": Matrix(136, 512, 3, 16),
    "q5g128": Matrix(136, 1024, 5, 128),
    "q6g64": Matrix(136, 576, 6, 64),
    "q8g32": Matrix(136, 1056, 8, 32),
    "f16": Matrix(136, 576, 16),
}
TABLED = {"iq4_xs": Matrix(136, 1024, 4, 32, scales=IQ4["IQ4_XS"])}


def _random(rng: np.random.Generator, k: int) -> Array:
    return rng.standard_normal((ROWS, k))


def _outliers(rng: np.random.Generator, k: int) -> Array:
    """Two inputs of all rows are a thousand times as large as the others, as massive activations are."""
    x = _random(rng, k)
    x[:, [5, k - 7]] *= 1000
    return x


def _sizes(rng: np.random.Generator, k: int) -> Array:
    """Rows of sizes from 1e-4 to 1e4."""
    return _random(rng, k) * np.logspace(-4, 4, ROWS)[:, None]


def _massive(rng: np.random.Generator, k: int) -> Array:
    """Inputs 5, 37 and 50 of all rows are ten thousand times as large as the others; they add up to zero."""
    x = _random(rng, k)
    x[:, list(MASSIVE)] = rng.uniform(1, 2, (ROWS, 1)) * (7003.7, 9741.3, -16745.0)
    return x


KINDS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "random": _random, "outliers": _outliers, "sizes": _sizes,
}  # fmt: skip
TARGETS, DEVICES = ("webgpu", "vulkan"), ("mobile", "discrete")
MASSIVE = (5, 37, 50)
MOST = 9e-4
"""Bound of a row's root mean square error, relative to the root mean square of its outputs. Rounding rows to
float16 gives 2e-4 to 4e-4.
"""
EXACT = 1e-6
"""Bound of a row's errors if products are float32 and rows are already float16."""


def runner(target: str) -> gpu_checks.Run:
    """A function that runs a kernel, on a machine that can run it."""
    if target == "vulkan":
        from tests.support import vulkan_run

        return vulkan_run.run
    from . import webgpu_harness

    return webgpu_harness.run


@cache
def stages(target: str, device: str, job: Linear) -> Staged:
    """The kernels of a job in a target's program."""
    return variant(CLASSES[device], "f16", target == "vulkan").kernels.stages(job)


def errors(target: str, device: str, job: Linear, arrays: dict[str, Array]) -> Array:
    """For each row, the root mean square of its errors divided by that of its outputs."""
    staged = stages(target, device, job)
    given = {name: array for name, array in arrays.items() if name != "w"}
    got = runner(target)(staged, "f16", given | {"out": np.zeros(*job.out)})["out"]
    want = reference(job, arrays)["out"]
    assert np.isfinite(got).all()
    wrong: Array = np.sqrt(((got - want) ** 2).mean(axis=1) / (want**2).mean(axis=1))
    return wrong


@in_turns("target", "device")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MATRICES | TABLED)
def test_products_are_off_by_little(name: str, device: str, target: str) -> None:
    matrix = (MATRICES | TABLED)[name]
    kernels = variant(CLASSES["discrete"], "f16", False).kernels
    # all rows use one kernel, because compiling it takes longer than all else
    for kind, rows in KINDS.items():
        rng = np.random.default_rng(3)
        for x_dtype, norm in (("float16", None), ("float32", 1e-12)):
            job = Linear(ROWS, matrix, x_dtype, "float32", norm=norm)
            arrays = gpu_inputs.inputs(kernels, job, rng)
            arrays["x"] = rows(rng, matrix.k).astype(x_dtype)
            most = EXACT if norm is None and not matrix.quantized else MOST
            assert errors(target, device, job, arrays).max() < most, (kind, x_dtype)


@in_turns("target", "device")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MATRICES)
def test_inputs_that_dwarf_others_and_cancel_are_exact(name: str, device: str, target: str) -> None:
    """All columns have one weight for three massive inputs, which cancel, so the other inputs make the
    output.
    """
    matrix, rng = MATRICES[name], np.random.default_rng(3)
    codes = rng.integers(0, 2 ** min(matrix.bits, 8), (matrix.n, matrix.k)).astype(np.uint8)
    codes[:, list(MASSIVE)] = 2 ** min(matrix.bits, 8) - 1
    kernels = variant(CLASSES["discrete"], "f16", False).kernels
    if matrix.quantized:
        groups = matrix.n, matrix.k // matrix.group
        scales, biases = np.full(groups, 2.0**-matrix.bits, np.float16), np.full(groups, -0.5, np.float16)
        packed = kernels.pack(matrix, QuantTensor.of_codes(codes, scales, biases, matrix.bits))
    else:
        packed = kernels.pack(matrix, codes.astype(np.float32) / 256 - np.float32(0.5))
    weights = codes / 2.0 ** min(matrix.bits, 8) - 0.5
    arrays = {f"w{i}": part for i, part in enumerate(packed)}
    for gate in (None, "silu"):
        job = Linear(ROWS, matrix, "float32", "float32", norm=1e-12, gate=gate)
        more = gpu_inputs.inputs(kernels, job, rng)
        more |= {**arrays, "w": weights, "x": _massive(rng, matrix.k).astype(np.float32)}
        more["norm"][list(MASSIVE)] = 1
        more["norm"] *= 50
        most = MOST if gate is None else 2 * MOST  # a gated product has the errors of two products
        assert errors(target, device, job, more).max() < most


@in_turns("target")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("bits", "how"),
    [*((bits, PAIRS) for bits in (2, 3, 4, 5, 6, 8)), (4, IQ4["IQ4_NL"])],
    ids=["2", "3", "4", "5", "6", "8", "iq4_nl"],
)
def test_the_largest_inputs_do_not_overflow(bits: int, how: Scales, target: str) -> None:
    """All codes are at one end of their range, all inputs just below the power of two by which they are
    scaled.
    """
    matrix = Matrix(64, 256, bits, 64, scales=how)
    kernels = variant(CLASSES["discrete"], "f16", False).kernels
    scales = np.full((64, 4), 0.01, np.float16)
    codes = np.where(np.arange(64)[:, None] % 2, 2**bits - 1, 0).astype(np.uint8).repeat(256, axis=1)
    tensor = QuantTensor.of_codes(codes, scales, np.zeros_like(scales), bits)
    packed = {f"w{i}": part for i, part in enumerate(kernels.pack(matrix, tensor))}
    weights = values_of(codes, how) * scales[0, 0].astype(np.float64)
    for x_dtype, largest in (("float16", 65504), ("float32", np.float32(2.0**110) * (1 - 2.0**-20))):
        job = Linear(ROWS, matrix, x_dtype, "float32")
        arrays = {**packed, "x": np.full((ROWS, 256), largest, x_dtype), "w": weights}
        assert errors(target, "discrete", job, arrays).max() < MOST
