"""Figures of GPU kernels, computed from the kernels: of toys that can be counted by hand, and of our own
kernels.
"""

from __future__ import annotations

from functools import cache

import pytest
import tvm
from tvm.script import tirx as T

from nearfar.build import manifest
from nearfar.build.program.compile import Compilation, compile_program
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.jobs import Attend, Linear
from nearfar.kernels.quantized import Matrix
from nearfar.step.reading import read_model
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import DISCRETE, MOBILE, SOFTWARE, DeviceClass
from nearfar.targets.gpu.figures import Figures, figures_of
from nearfar.targets.gpu.kernels.common import finish
from nearfar.targets.gpu.tir_passes import EXPLICIT_SYNC
from tests.support.architectures import CASES

N, K = 512, 1024


def q4(n: int, k: int, m: int = 1) -> Linear:
    return Linear(m, Matrix(n, k, 4, 64), "float16", "float32", residual=True)


@cache
def software(job: Linear | Attend) -> Figures:
    return figures_of(variant(SOFTWARE, "f16", False).kernels.stages(job).stages[0].func)


def split_k(lanes: int, stride: int) -> Figures:
    """A toy matvec: of 32 threads `lanes` lie along n with 4 columns each, `stride` apart; the others split
    k.

    A thread loads 4 vectors of words and one of scales in an iteration, and there is one barrier.
    """
    parts = 32 // lanes

    @T.prim_func(check_well_formed=False)
    def kernel(
        x: T.Buffer((1, K // 4), "float16x4"),
        w0: T.Buffer((K // 8, N // 4), "uint32x4"),
        w1: T.Buffer((K // 32, N // 4), "uint32x4"),
        out: T.Buffer((1, N), "float32"),
    ):
        for bx in T.thread_binding(N // 4 // lanes, thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                word = T.alloc_local((5,), "uint32x4")
                total = T.alloc_local((4,), "float16")
                shared = T.alloc_shared((32,), "float32")
                for turn in T.serial(K // 32 // parts):
                    group = tx // lanes * (K // 32 // parts) + turn
                    column = (bx * lanes + tx % lanes) * stride % (N // 4)
                    for e in T.unroll(4):
                        word[e] = w0[group * 4 + e, column]
                    word[4] = w1[group, column]
                    total[0] = total[0] + T.Shuffle([x[0, group]], [0]) * T.Cast(
                        "float16", T.Shuffle([word[0]], [0])
                    )
                shared[tx] = T.Cast("float32", total[0])
                T.tvm_storage_sync("shared")
                if tx < lanes:
                    out[0, bx * lanes + tx] = shared[tx]

    return figures_of(finish(kernel, "toy"))


def test_a_toy_is_as_counted_by_hand() -> None:
    found = split_k(lanes=8, stride=1)
    assert (found.workgroups, found.threads_per_workgroup, found.threads) == (16, 32, 512)
    assert found.bytes_in_flight == 512 * 5 * 16
    assert found.loads_ahead == 5
    assert found.serial_steps == K // 32 // 4
    assert found.loads_per_byte == 1 / 16
    assert found.weight_reads == 1
    assert found.x_loads == 1 / 5
    assert (found.barriers, found.shared_bytes, found.storage_buffers) == (1, 128, 4)
    assert found.barriers_per_k == 1 / K
    assert found.line_use == 1
    assert found.idle == 0
    assert found.largest_binding == K // 8 * N * 4


@pytest.mark.parametrize(("lanes", "dtype", "operations"), [(4, "float32x4", 4), (2, "float16x4", 2)])
def test_a_multiplication_with_addition_is_one_operation_and_two_float16_are_one(
    lanes: int, dtype: str, operations: int
) -> None:
    @T.prim_func(check_well_formed=False)
    def kernel(
        x: T.Buffer((1, 1), dtype), w0: T.Buffer((1, 4), f"uint32x{lanes}"), out: T.Buffer((1, 4), dtype)
    ):
        for tx in T.thread_binding(4, thread="threadIdx.x"):
            out[0, tx] = T.call_pure_extern(dtype, "fma", T.reinterpret(dtype, w0[0, tx]), x[0, 0], x[0, 0])

    found = figures_of(finish(kernel, "toy"))
    assert found.operations_per_weight == pytest.approx(4 * operations / (4 * lanes * 4))


def test_threads_far_apart_use_part_of_each_line() -> None:
    assert split_k(lanes=8, stride=8).line_use == pytest.approx(16 / 128)
    assert split_k(lanes=2, stride=1).line_use == pytest.approx(32 / 128)


@pytest.mark.parametrize(
    ("n", "k", "threads", "in_flight"),
    [(2048, 2048, 2048, 65536), (128256, 2048, 16032, 513024), (576, 576, 72, 2304), (576, 1536, 72, 2304)],
)
def test_software_matvecs_have_little_in_flight(n: int, k: int, threads: int, in_flight: int) -> None:
    """Each thread has eight rows, and loads a word of each row in an iteration."""
    found = software(q4(n, k))
    assert (found.threads, found.bytes_in_flight, found.weight_reads) == (threads, in_flight, 1)
    assert found.operations_per_weight == pytest.approx(4.5, abs=0.1)


def test_the_software_matmul_reads_each_weight_for_every_eight_rows() -> None:
    found = software(q4(2048, 2048, m=256))
    assert (found.weight_reads, found.barriers_per_k, found.flop_per_byte) == (32, 0.25, 25.6)


@pytest.mark.parametrize("m", [1, 16, 256])
def test_software_attention_reads_the_cache_for_every_row(m: int) -> None:
    job = Attend(m, 32, 8, 64, 16, 8, 128, "float16", "float16")
    assert software(job).cache_reads == pytest.approx(1, rel=0.01)


def gathering(rows: int, held: int) -> Figures:
    """A toy without a matrix: threads keep `held` sums; the first `rows` of 100 values are gathered through
    workgroup memory, which a loop fills in parts.
    """

    @T.prim_func(check_well_formed=False)
    def kernel(values: T.Buffer((100, 32), "float32"), out: T.Buffer((held, 32), "float32")):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            place = T.alloc_shared((96,), "int32")
            total = T.alloc_local((held,), "float32")
            for i in T.serial(3):
                if i * 32 + tx < rows:
                    place[i * 32 + tx] = rows - 1 - (i * 32 + tx)
            T.tvm_storage_sync("shared")
            for e in T.unroll(held):
                total[e] = T.float32(0)
            for p in T.serial(rows):
                for e in T.unroll(held):
                    total[e] = total[e] + values[place[p], tx]
            for e in T.unroll(held):
                out[e, tx] = total[e]

    return figures_of(finish(kernel, "toy"))


def test_integers_are_followed_through_workgroup_memory_and_loops() -> None:
    found = gathering(rows=70, held=1)
    assert found.serial_steps == 70
    assert found.line_use == 1
    assert found.bytes_in_flight == 32 * 4
    assert (found.bytes_written, found.shared_bytes, found.barriers) == (128, 384, 1)
    assert (found.weight_reads, found.cache_reads, found.x_loads) == (None, None, None)


def test_registers_are_what_lives_at_once() -> None:
    few, many = gathering(rows=70, held=4).registers, gathering(rows=70, held=20).registers
    assert many - few == 16
    assert 4 <= few <= 8


def test_threads_without_work_are_idle() -> None:
    """40 columns are work for 10 threads of a workgroup of 32 threads with 4 columns each."""

    @T.prim_func(check_well_formed=False)
    def kernel(
        x: T.Buffer((1, 64), "float32"),
        w0: T.Buffer((8, 40), "uint32"),
        out: T.Buffer((1, 40), "float32"),
    ):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            if tx < 10:
                for k in T.serial(8):
                    for e in T.vectorized(4):
                        out[0, tx * 4 + e] = x[0, k] * T.Cast("float32", w0[k, tx * 4 + e])

    found = figures_of(finish(kernel, "toy"))
    assert found.idle == pytest.approx(22 / 32)
    assert (found.weight_reads, found.loads_per_byte, found.serial_steps) == (1, 1 / 16, 8)


def test_kernels_that_tvm_schedules_have_figures_too() -> None:
    case = next(case for case in CASES if case.model_type == "gemma4_text")
    model = read_model({**case.config, "model_type": case.model_type}).model
    matrices = {param.name: Matrix(param.n, param.k, 16) for param in model.step.params if param.is_matrix}
    job = Compilation(model, matrices, manifest.CACHE, Buckets((1,), (1,)))
    program = compile_program(job, variant(SOFTWARE, "f16", False), tvm.target.Target("webgpu"))
    others = [kernel for kernel in program.kernels.values() if EXPLICIT_SYNC not in kernel.attrs]
    assert others
    for kernel in others:
        found = figures_of(kernel)
        assert found.threads >= found.threads_per_workgroup > 0
        assert found.bytes_written > 0


@pytest.mark.parametrize("device", [DISCRETE, MOBILE])
def test_products_of_bytes_take_half_of_the_operations(device: DeviceClass) -> None:
    """A dot product of words replaces four products; the figures for matrix, barriers and registers do not
    grow.
    """
    job = q4(2048, 2048, m=256)
    variants = [variant(device, "f16", False), variant(device, "f16", False, "int8")]
    plain, (rows, product) = (
        [figures_of(stage.func) for stage in each.kernels.stages(job).stages] for each in variants
    )
    assert product.operations_per_weight is not None
    assert product.operations_per_weight < 0.8
    assert product.operations_per_weight < 0.5 * (plain[0].operations_per_weight or 0)
    assert product.weight_reads == pytest.approx(256 / device.tile[0], rel=0.05)
    assert (product.barriers_per_k, product.line_use) == (1 / 32, 1)
    assert product.registers <= 96
    assert product.shared_bytes <= device.shared_bytes
    assert max(product.storage_buffers, rows.storage_buffers) <= 8
