"""SPIR-V of control flow, memory and subgroups against NumPy, on a Vulkan device (lavapipe on a machine
without a GPU). test_vulkan_kernels.py has the arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tests.support import vulkan_run
from tests.support.vulkan_run import finished, launch, module_of

RNG = np.random.default_rng(3)
N = 77  # no multiple of the workgroup's size


def test_a_guarded_load_is_not_made() -> None:
    """The index is valid only if the condition holds: lavapipe would fault 2^29 elements beyond the
    buffer.
    """
    a, b = np.arange(N, dtype=np.float32), np.array([3, 1 << 29, -(1 << 29)] * 25 + [0, 76], np.int32)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((N,), "float32"), b: T.Buffer((N,), "int32"), out: T.Buffer((N,), "float32")):
        for bx in T.thread_binding(3, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                at = T.alloc_local((1,), "int32")
                at[0] = bx * 32 + tx
                if at[0] < N:
                    out[at[0]] = T.if_then_else(
                        b[at[0]] >= 0 and b[at[0]] < N and a[b[at[0]]] > T.float32(0),
                        a[b[at[0]]],
                        T.float32(-1),
                    )

    want = np.where((b > 0) & (b < N), np.clip(b, 0, N), -1).astype(np.float32)
    np.testing.assert_array_equal(launch(finished(kernel), a, b, np.zeros(N, np.float32)), want)


def test_barriers_and_shared_memory() -> None:
    """Each workgroup reverses its part and sums it: 96 threads, several subgroups; also int64 and bool."""
    a = RNG.integers(-1000, 1000, 192).astype(np.int64)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((192,), "int64"), out: T.Buffer((192,), "int64")):
        for bx in T.thread_binding(2, thread="blockIdx.x"):
            for tx in T.thread_binding(96, thread="threadIdx.x"):
                part = T.alloc_shared((96,), "int64")
                positive = T.alloc_shared((96,), "bool")
                total = T.alloc_local((1,), "int64")
                part[tx] = a[bx * 96 + tx]
                positive[tx] = a[bx * 96 + tx] > T.int64(0)
                T.tvm_storage_sync("shared")
                total[0] = T.int64(0)
                for i in T.serial(96):
                    if positive[i]:
                        total[0] = total[0] + part[i]
                T.tvm_storage_sync("shared")
                out[bx * 96 + tx] = part[95 - tx] * T.int64(100000) + total[0]

    parts = a.reshape(2, 96)
    want = parts[:, ::-1] * 100000 + np.where(parts > 0, parts, 0).sum(1, keepdims=True)
    np.testing.assert_array_equal(launch(finished(kernel), a, np.zeros(192, np.int64)), want.ravel())


def test_loops_locals_and_branches() -> None:
    """A while loop (steps of Collatz), an array at unknown indices, nested branches, values across blocks."""
    a = RNG.integers(1, 200, N).astype(np.int32)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((N,), "int32"), out: T.Buffer((N,), "int32")):
        for bx in T.thread_binding(3, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                value = T.alloc_local((2,), "int32")
                seen = T.alloc_local((4,), "int32")
                if bx * 32 + tx < N:
                    for i in T.serial(4):
                        seen[i] = i
                    value[0] = a[bx * 32 + tx]
                    value[1] = 0
                    while value[0] != 1:
                        if value[0] % 2 == 0:
                            value[0] = value[0] // 2
                        else:
                            value[0] = value[0] * 3 + 1
                            if value[1] > 10:
                                seen[value[0] % 4] = seen[value[0] % 4] + 1
                        value[1] = value[1] + 1
                    for i in T.serial(a[bx * 32 + tx] % 4):
                        value[1] = value[1] + 1000 * seen[i]
                    out[bx * 32 + tx] = value[1]

    want = []
    for start in a:
        value, steps, seen = int(start), 0, [0, 1, 2, 3]
        while value != 1:
            odd = value % 2
            value = value * 3 + 1 if odd else value // 2
            if odd and steps > 10:
                seen[value % 4] += 1
            steps += 1
        want.append(steps + 1000 * sum(seen[: start % 4]))
    np.testing.assert_array_equal(launch(finished(kernel), a, np.zeros(N, np.int32)), want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("offset", [0, 1])
def test_vectors(dtype: str, offset: int) -> None:
    """Four elements a thread: whole vectors at offset 0, else element by element."""
    a = RNG.integers(-50, 50, 4 * 96 + 4).astype(dtype)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((388,), dtype), out: T.Buffer((384,), dtype)):
        for bx in T.thread_binding(3, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                for v in T.vectorized(4):
                    out[(bx * 32 + tx) * 4 + v] = a[(bx * 32 + tx) * 4 + v + offset] * T.Cast(dtype, 2)

    got = launch(finished(kernel), a, np.zeros(384, dtype))
    np.testing.assert_array_equal(got, a[offset : 384 + offset] * np.array(2, dtype))


def test_a_grid_wider_than_a_device_takes() -> None:
    count = 70001 * 2

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((count,), "int32"), out: T.Buffer((count,), "int32")):
        for bx in T.thread_binding(70001, thread="blockIdx.x"):
            for tx in T.thread_binding(2, thread="threadIdx.x"):
                out[bx * 2 + tx] = a[bx * 2 + tx] + 1

    made = module_of(finished(kernel))
    assert made.grid == (65535, 1, 2)
    a = np.arange(count, dtype=np.int32)
    np.testing.assert_array_equal(vulkan_run.run_module(made, [a, np.zeros(count, np.int32)])[1], a + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_subgroup_shuffles(dtype: str) -> None:
    """CUDA's shuffles among four lanes: a lane without a partner keeps its own value."""
    a = RNG.integers(0, 50, 32).astype(dtype)
    makers = {"": 0, "_up": 1, "_down": 2}

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((32,), dtype), out: T.Buffer((3, 32), dtype)):
        for _ in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                value = T.alloc_local((1,), dtype)
                value[0] = a[tx]
                out[0, tx] = T.tvm_warp_shuffle(T.uint32(0), value[0], 1, 4, 4)
                out[1, tx] = T.tvm_warp_shuffle_up(T.uint32(0), value[0], 1, 4, 4)
                out[2, tx] = T.tvm_warp_shuffle_down(T.uint32(0), value[0], 1, 4, 4)

    made = module_of(finished(kernel))
    assert made.subgroup_size == 4
    assert {"subgroupBasic", "subgroupShuffle"} <= set(made.features)
    lanes = a.reshape(8, 4)
    want = np.stack([lanes[:, [1] * 4], lanes[:, [0, 0, 1, 2]], lanes[:, [1, 2, 3, 3]]])
    got = vulkan_run.run_module(made, [a, np.zeros((3, 32), dtype)])[1]
    np.testing.assert_array_equal(got, want.reshape(len(makers), 32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint32"])
def test_subgroup_reductions(dtype: str) -> None:
    width = vulkan_run.device().subgroup.subgroupSize
    a = RNG.integers(0, 50, 4 * width).astype(dtype)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((4 * width,), dtype), out: T.Buffer((3, 4 * width), dtype)):
        for _ in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(4 * width, thread="threadIdx.x"):
                out[0, tx] = T.call_pure_extern(dtype, "subgroup_add", a[tx])
                out[1, tx] = T.call_pure_extern(dtype, "subgroup_min", a[tx])
                out[2, tx] = T.call_pure_extern(dtype, "subgroup_max", a[tx])

    lanes = a.reshape(4, width)
    want = np.repeat(np.stack([lanes.sum(1), lanes.min(1), lanes.max(1)]), width, axis=1)
    np.testing.assert_array_equal(launch(finished(kernel), a, np.zeros((3, 4 * width), dtype)), want)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reductions_that_tvm_schedules(dtype: str) -> None:
    """TVM's own kernels: its thread_allreduce becomes workgroup memory and barriers."""
    from tvm import relax
    from tvm.s_tir import dlight

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((5, 300), dtype))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.softmax(x)))
    schedules = (dlight.gpu.Reduction(), dlight.gpu.GeneralReduction(), dlight.gpu.Fallback())
    with tvm.target.Target({"kind": "vulkan", "host": "llvm"}):
        module = dlight.ApplyDefaultSchedule(*schedules)(relax.transform.LegalizeOps()(builder.get()))
    func = next(f for f in module.functions.values() if isinstance(f, tirx.PrimFunc))
    a = RNG.standard_normal((5, 300)).astype(dtype)
    weights = np.exp(a.astype(np.float64))
    want = weights / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(
        launch(func, a, np.zeros_like(a)), want, rtol=2e-5 if dtype == "float32" else 1e-2
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_neighbours_loaded_at_once(dtype: str) -> None:
    """Loads from a storage buffer, and from workgroup memory that changes between two loads of the same four
    elements.
    """
    a = RNG.integers(-100, 100, 8 * 32).astype(dtype)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((256,), dtype), out: T.Buffer((32,), "float32")):
        for _ in T.thread_binding(1, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                part = T.alloc_shared((32,), "float32")
                total = T.alloc_local((1,), "float32")
                total[0] = T.float32(0)
                part[tx] = T.Cast("float32", a[tx])
                T.tvm_storage_sync("shared")
                for e in T.unroll(8):
                    total[0] = total[0] + T.Cast("float32", a[tx * 8 + e]) * part[e + 4]
                T.tvm_storage_sync("shared")
                part[31 - tx] = T.Cast("float32", tx)
                T.tvm_storage_sync("shared")
                for e in T.unroll(8):
                    total[0] = total[0] + part[e + 4] * T.Cast("float32", e)
                for i in T.serial(4):
                    for e in T.unroll(4):
                        total[0] = total[0] + part[i * 4 + e + 8]
                out[tx] = total[0]

    first, second = a[:32].astype(np.float64), np.arange(32)[::-1]
    want = (
        a.reshape(32, 8).astype(np.float64) @ first[4:12] + second[4:12] @ np.arange(8) + second[8:24].sum()
    )
    np.testing.assert_array_equal(
        launch(finished(kernel), a, np.zeros(32, np.float32)), want.astype(np.float32)
    )


def test_break_and_continue() -> None:
    """The sum of the odd numbers before the first multiple of 7."""
    a = RNG.integers(1, 100, N).astype(np.int32)

    @T.prim_func(check_well_formed=False)
    def kernel(a: T.Buffer((N,), "int32"), out: T.Buffer((N,), "int32")):
        for bx in T.thread_binding(3, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                total = T.alloc_local((1,), "int32")
                if bx * 32 + tx < N:
                    total[0] = 0
                    for i in T.serial(10):
                        if (a[bx * 32 + tx] + i) % 7 == 0:
                            break
                        if (a[bx * 32 + tx] + i) % 2 == 0:
                            continue
                        total[0] = total[0] + a[bx * 32 + tx] + i
                    out[bx * 32 + tx] = total[0]

    want = []
    for start in a.tolist():
        before = next(i for i in range(10) if (start + i) % 7 == 0)
        want.append(sum(start + i for i in range(before) if (start + i) % 2))
    np.testing.assert_array_equal(launch(finished(kernel), a, np.zeros(N, np.int32)), want)
