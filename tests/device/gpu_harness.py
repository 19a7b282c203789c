"""The GPU targets by name, for tests of kernels that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nearfar.format.manifest import Float
from nearfar.kernels.contract import Kernels, Precision, Products
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from nearfar.targets.gpu.pieces import BINDING
from tests.support import gpu_checks

TARGETS = pytest.mark.parametrize("target", ["webgpu", "vulkan"])
PRECISIONS = pytest.mark.parametrize("precision", ["f32", "f16"])
DTYPES: dict[Precision, Float] = {"f32": "float32", "f16": "float16"}


def runner(target: str) -> gpu_checks.Run:
    """A function that runs the stages of a job; skips the test where the target's package is missing."""
    if target == "vulkan":
        from tests.support import vulkan_run

        return vulkan_run.run
    from . import webgpu_harness

    return webgpu_harness.run


def kernels(
    target: str,
    precision: Precision,
    device: str = "software",
    products: Products = "float",
    binding: int = BINDING,
) -> Kernels:
    """The kernels of a target's program for a class of devices."""
    return variant(CLASSES[device], precision, target == "vulkan", products, binding).kernels


@contextmanager
def about(case: object) -> Iterator[None]:
    """Name the case in the error of a failure within the block, for tests that run several cases over one
    kernel.
    """
    try:
        yield
    except AssertionError as error:
        error.add_note(f"case: {case}")
        raise
