"""How kernels become PrimFuncs: as TVM's own decorator makes them, and once for all targets."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from nearfar.targets import vulkan, webgpu
from nearfar.targets.gpu.kernels.script import prim_func
from nearfar.targets.jobs import Greedy, Linear, Norm
from nearfar.targets.quantized import Matrix

SCALE = 3.0


def test_a_kernel_is_what_tvm_makes_of_it() -> None:
    """A global, a variable of the maker, a function of it, and one that only annotations name."""
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


def test_programs_and_targets_share_the_kernels_that_are_the_same() -> None:
    half, full, *_ = (variant.kernels for variant in webgpu.VARIANTS)
    other = vulkan.VARIANTS[0].kernels
    for job in (Greedy(4, 300), Norm(4, 24, 1e-6)):
        assert half.stages(job) is full.stages(job) is other.stages(job)
    linear = Linear(1, Matrix(64, 1536, 8, 64), "float32", "float32")
    assert half.stages(linear) is full.stages(linear)
    assert half.stages(linear) is not other.stages(linear), "it loads words side by side"
