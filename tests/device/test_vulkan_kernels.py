"""SPIR-V of single operations against NumPy, on a Vulkan device (lavapipe on a machine without a GPU)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.gpu.kernels.common import select
from nearfar.targets.vulkan import modules
from tests.support import vulkan_run
from tests.support.spirv import validate

RNG = np.random.default_rng(2)
N = 77  # no multiple of the workgroup
NAN, INF = float("nan"), float("inf")
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.5, 1e-3, 700.0, -700.0, 1e10, -1e10, INF, -INF, NAN], np.float32
)


def module_of(func: tirx.PrimFunc) -> Any:
    """The SPIR-V module of a kernel, which must be valid."""
    made = modules(tvm.IRModule({"kernel": func}))["kernel"]
    if shutil.which("spirv-val"):
        validate(made.code)
    return made


def launch(func: tirx.PrimFunc, *arrays: np.ndarray) -> np.ndarray:
    """The last array after the kernel."""
    return vulkan_run.run_module(module_of(func), arrays)[-1]


Compute = Callable[..., Any]


def elementwise(computes: Sequence[Compute], dtypes: list[str], out: str, count: int = N) -> tirx.PrimFunc:
    """c[k, i] = computes[k](a[k, i], b[k, i]); with one dtype computes[k](a[k, i])."""
    first, second, rows = dtypes[0], dtypes[-1], len(computes)
    binary = len(dtypes) == 2

    def store(a: Any, b: Any, c: Any, i: Any) -> None:
        for k, compute in enumerate(computes):
            T.buffer_store(c, compute(a[k, i], b[k, i]) if binary else compute(a[k, i]), [k, i])

    @T.prim_func(check_well_formed=False)
    def kernel(
        a: T.Buffer((rows, count), first), b: T.Buffer((rows, count), second), c: T.Buffer((rows, count), out)
    ):
        for bx in T.thread_binding(-(-count // 32), thread="blockIdx.x"):
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                if bx * 32 + tx < count:
                    store(a, b, c, bx * 32 + tx)

    return select(kernel, ["a", "b", "c"] if binary else ["a", "c"], "kernel")


def run_rows(computes: Sequence[Compute], out: str, *arrays: np.ndarray) -> np.ndarray:
    """Each operation over its row of the arrays, by one kernel: to compile it costs more than all else."""
    func = elementwise(computes, [str(a.dtype) for a in arrays], out, arrays[0].shape[-1])
    return launch(func, *arrays, np.zeros(arrays[0].shape, out))


def run_elementwise(compute: Compute, out: str, *arrays: np.ndarray) -> np.ndarray:
    """Run one operation over arrays."""
    return run_rows([compute], out, *(array[None] for array in arrays))[0]


def integers(dtype: str) -> np.ndarray:
    """N numbers over the whole range, its ends and small ones among them."""
    info = np.iinfo(dtype)
    ends = [info.min, info.max, info.min + 1, info.max - 1, 0, 1, 2, 3, 5, 7]
    ends += [-1, -2, -3, -5, -7, -8, -9] if info.min else [8, 9, 16, 100]
    spread = RNG.integers(info.min, info.max, N - len(ends), dtype=dtype, endpoint=True)
    return np.concatenate([np.array(ends, dtype), spread])


def divisors(dtype: str) -> np.ndarray:
    """Numbers of both signs and sizes, none of them 0 or -1 (by which the lowest number overflows)."""
    b = integers(dtype)[RNG.permutation(N)]
    small = RNG.integers(2, 9, N).astype(dtype)
    b[::2] = small[::2] * (
        np.where(RNG.random((N + 1) // 2) < 0.5, -1, 1).astype(dtype) if np.iinfo(dtype).min else 1
    )
    b[(b == 0) | (b == np.array(-1).astype(dtype))] = 3
    return b


def trunc_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide = [v.astype(object) for v in (a, b)]
    return np.array(
        [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(*wide, strict=True)]
    ).astype(a.dtype)


def shifts(dtype: str) -> np.ndarray:
    return RNG.integers(0, np.dtype(dtype).itemsize * 8, N).astype(dtype)


INTEGER_OPS: dict[str, tuple[Any, Any, Any]] = {
    "add": (lambda a, b: a + b, np.add, integers),
    "sub": (lambda a, b: a - b, np.subtract, integers),
    "mul": (lambda a, b: a * b, np.multiply, integers),
    "floordiv": (tirx.floordiv, np.floor_divide, divisors),
    "floormod": (tirx.floormod, np.mod, divisors),
    "truncdiv": (tirx.truncdiv, trunc_div, divisors),
    "truncmod": (tirx.truncmod, np.fmod, divisors),
    "min": (tirx.min, np.minimum, integers),
    "max": (tirx.max, np.maximum, integers),
    "and": (lambda a, b: a & b, np.bitwise_and, integers),
    "xor": (lambda a, b: a ^ b, np.bitwise_xor, integers),
    "shl": (lambda a, b: a << b, np.left_shift, shifts),
    "shr": (lambda a, b: a >> b, np.right_shift, shifts),
}


DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]


@pytest.mark.parametrize("name", INTEGER_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers(dtype: str, name: str) -> None:
    got, want = of_integers(dtype)
    np.testing.assert_array_equal(got[name], want[name])


@cache
def of_integers(dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What each operation gives, and should give, of numbers of a type."""
    a, b = (
        np.stack([make(dtype) for make in made])
        for made in zip(*((integers, other) for _, _, other in INTEGER_OPS.values()), strict=True)
    )
    with np.errstate(over="ignore"):
        want = [
            expected(x, y).astype(dtype)
            for (_, expected, _), x, y in zip(INTEGER_OPS.values(), a, b, strict=True)
        ]
    got = run_rows([compute for compute, _, _ in INTEGER_OPS.values()], dtype, a, b)
    return dict(zip(INTEGER_OPS, got, strict=True)), dict(zip(INTEGER_OPS, want, strict=True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_sums_wrap_before_they_are_computed_with(dtype: str) -> None:
    """A store takes the low bits anyway, so the operation that follows must see them."""
    a, b = integers(dtype), integers(dtype)[RNG.permutation(N)]
    with np.errstate(over="ignore"):
        want = (a + b) >> np.array(1, dtype)
    got = run_elementwise(lambda a, b: (a + b) >> tirx.const(1, dtype), dtype, a, b)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("divisor", [8, -8, 3, -3, 1])
def test_division_by_constants(divisor: int) -> None:
    a = integers("int32")
    number = T.int32(divisor)

    def both(x: Any) -> Any:
        return (
            tirx.floordiv(x, number)
            ^ tirx.floormod(x, number) * 5
            ^ tirx.truncdiv(x, number) * 9
            ^ tirx.truncmod(x, number) * 17
        )

    wide = a.astype(np.int64)
    quotient, rest = np.floor_divide(wide, divisor), np.mod(wide, divisor)
    cut = trunc_div(wide, np.full(N, divisor))
    want = (quotient ^ rest * 5 ^ cut * 9 ^ (wide - cut * divisor) * 17).astype(np.int32)
    np.testing.assert_array_equal(run_elementwise(both, "int32", a), want)


CASTS = [
    ("int32", "int8"), ("int32", "uint8"), ("int32", "uint16"), ("int8", "int32"), ("uint8", "int32"),
    ("int16", "uint32"), ("int64", "int32"), ("int32", "int64"), ("uint32", "int64"), ("int8", "int64"),
    ("uint32", "int32"), ("int32", "float32"), ("uint32", "float32"), ("int16", "float16"),
    ("int64", "float32"), ("uint8", "float32"), ("int8", "uint16"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "to"), CASTS, ids=lambda value: value)
def test_casts_of_integers(source: str, to: str) -> None:
    a = integers(source)
    got = run_elementwise(lambda x: x.astype(to), to, a)
    if to.startswith("float"):
        np.testing.assert_allclose(got.astype(np.float64), a.astype(to).astype(np.float64), rtol=1e-6)
    else:
        np.testing.assert_array_equal(got, a.astype(to))


@pytest.mark.parametrize("to", ["int8", "uint8", "int16", "int32", "uint32", "int64"])
def test_casts_of_floats_saturate(to: str) -> None:
    """As WGSL's: towards zero; what does not fit becomes the nearest end, a NaN 0."""
    a = np.concatenate(
        [
            FLOATS,
            np.float32([2.0**31, -(2.0**31), 2.0**32, 2.0**63, -(2.0**63), 127.9, -128.9, 255.5, 2147483520]),
        ]
    )
    info = np.iinfo(to)
    want = [
        0 if np.isnan(x) else info.max if x >= info.max else info.min if x <= info.min else int(x) for x in a
    ]
    np.testing.assert_array_equal(run_elementwise(lambda x: x.astype(to), to, a), np.array(want, to))


def test_casts_of_float16() -> None:
    a = np.concatenate([FLOATS, np.float32([65504, 65519, 65536, 1 + 2**-11 + 2**-20, 6e-5])])
    with np.errstate(over="ignore"):
        want = a.astype(np.float16)
    half = run_elementwise(lambda x: x.astype("float16"), "float16", a)
    np.testing.assert_array_equal(half, want)
    np.testing.assert_array_equal(
        run_elementwise(lambda x: x.astype("float32"), "float32", half), want.astype(np.float32)
    )
    np.testing.assert_array_equal(
        run_elementwise(lambda x: x.astype("int32"), "int32", want[:11]), want[:11].astype(np.int32)
    )


def pairs(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Every float with every other."""
    values = FLOATS.astype(dtype) if dtype == "float32" else np.clip(FLOATS, -60000, 60000).astype(dtype)
    a, b = np.meshgrid(values, values)
    return a.ravel().copy(), b.ravel().copy()


FLOAT_OPS: dict[str, tuple[Any, Any]] = {
    "add": (lambda a, b: a + b, np.add),
    "mul": (lambda a, b: a * b, np.multiply),
    "div": (lambda a, b: a / b, np.divide),
    "min": (tirx.min, lambda a, b: np.where(a < b, a, b)),
    "max": (tirx.max, lambda a, b: np.where(a > b, a, b)),
    "select": (
        lambda a, b: T.Select(a >= b, a, b * b.astype(b.ty.dtype)),
        lambda a, b: np.where(a >= b, a, b * b),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", FLOAT_OPS)
def test_floats(name: str, dtype: str) -> None:
    """With infinities and NaNs, but for what Vulkan leaves to the device: which of the two the min and max
    of a NaN and a number are, and quotients of float16 by more than 2^14.
    """
    a, b = pairs(dtype)
    with np.errstate(all="ignore"):
        want = FLOAT_OPS[name][1](a, b)
    rtol = 1e-6 if dtype == "float32" else 2e-3
    got = of_floats(dtype)[name]
    left = np.zeros(len(a), bool)
    if name in ("min", "max"):
        left = np.isnan(a) | np.isnan(b)
        for one, two in ((a, b), (b, a)):
            kept = got[np.isnan(one)]
            assert (np.isnan(kept) | (kept == two[np.isnan(one)])).all()
    if name == "div" and dtype == "float16":
        left = np.abs(b) > 2**14
    np.testing.assert_allclose(got[~left], want[~left], rtol=rtol, atol=1e-7)


@cache
def of_floats(dtype: str) -> dict[str, np.ndarray]:
    """What each operation gives of all pairs."""
    computes = [compute for compute, _ in FLOAT_OPS.values()]
    return dict(
        zip(FLOAT_OPS, run_rows(computes, dtype, *repeated(len(computes), *pairs(dtype))), strict=True)
    )


def repeated(rows: int, *arrays: np.ndarray) -> list[np.ndarray]:
    """Each array repeated in `rows` rows, one for each operation."""
    return [np.repeat(array[None], rows, axis=0) for array in arrays]


COMPARISONS: dict[str, tuple[Any, Any]] = {
    "eq": (tirx.EQ, np.equal), "ne": (tirx.NE, np.not_equal), "lt": (tirx.LT, np.less),
    "le": (tirx.LE, np.less_equal), "gt": (tirx.GT, np.greater), "ge": (tirx.GE, np.greater_equal),
}  # fmt: skip


@cache
def of_comparisons() -> dict[str, np.ndarray]:
    """What each comparison gives of all pairs."""
    computes = [compute for compute, _ in COMPARISONS.values()]
    return dict(zip(COMPARISONS, run_rows(computes, "bool", *repeated(len(computes), *pairs())), strict=True))


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str) -> None:
    np.testing.assert_array_equal(of_comparisons()[name], COMPARISONS[name][1](*pairs()))


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "exp": (tirx.exp, np.exp), "exp2": (tirx.exp2, np.exp2), "log": (tirx.log, np.log),
    "log2": (tirx.log2, np.log2), "log10": (tirx.log10, np.log10), "sqrt": (tirx.sqrt, np.sqrt),
    "rsqrt": (tirx.rsqrt, lambda x: 1 / np.sqrt(x)), "tanh": (tirx.tanh, np.tanh),
    "sigmoid": (tirx.sigmoid, lambda x: 1 / (1 + np.exp(-x))), "floor": (tirx.floor, np.floor),
    "ceil": (tirx.ceil, np.ceil), "trunc": (tirx.trunc, np.trunc), "nearbyint": (tirx.nearbyint, np.rint),
    "round": (tirx.round, np.rint), "abs": (tirx.abs, np.abs),
    "isnan": (lambda x: tirx.isnan(x).astype("float32"), np.isnan),
    "isinf": (lambda x: tirx.isinf(x).astype("float32"), np.isinf),
    "sin": (lambda x: tirx.sin(tirx.sigmoid(x)), lambda x: np.sin(1 / (1 + np.exp(-x)))),
    "seventh power": (lambda x: tirx.power(x * T.float32(0.25), T.float32(7)), lambda x: (x * 0.25) ** 7),
    "negative odd power": (lambda x: tirx.power(x + T.float32(0), T.float32(-5)), lambda x: (x + 0) ** -5.0),
    "cube": (lambda x: tirx.power(x, T.float32(3)), lambda x: x**3),
    "negative power": (lambda x: tirx.power(x, T.float32(-2)), lambda x: x**-2.0),
    "root of power": (lambda x: tirx.power(x, T.float32(1.5)), lambda x: x**1.5),
    "zeroth power": (lambda x: tirx.power(x, T.float32(0)), np.ones_like),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    a, found = of_functions()
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name][1](a.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(found[name], want, rtol=3e-5, atol=2e-6)


@cache
def of_functions() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Numbers, and what each function gives of them."""
    a = np.concatenate([FLOATS, RNG.uniform(-8, 8, 40).astype(np.float32), np.float32([88, 1e-30, 3e38])])
    computes = [compute for compute, _ in FUNCTIONS.values()]
    found = run_rows(computes, "float32", *repeated(len(computes), a))
    return a, dict(zip(FUNCTIONS, found, strict=True))


def test_functions_of_float16() -> None:
    a = RNG.uniform(0.5, 8, N).astype(np.float16)  # near 0.27 the two cancel
    got = run_elementwise(lambda x: tirx.exp(x) + tirx.log(x), "float16", a)
    np.testing.assert_allclose(got, np.exp(a.astype(np.float32)) + np.log(a.astype(np.float32)), rtol=2e-3)


def test_reinterpretation_and_halves() -> None:
    bits = np.concatenate([FLOATS.view(np.uint32), RNG.integers(0, 2**32, 40, dtype=np.uint32)])
    np.testing.assert_array_equal(
        run_elementwise(lambda x: T.reinterpret("uint32", x), "uint32", FLOATS), FLOATS.view(np.uint32)
    )
    floats = run_elementwise(
        lambda x: T.reinterpret("float32", x ^ T.uint32(1)), "float32", FLOATS.view(np.uint32)[:15]
    )
    np.testing.assert_array_equal(floats.view(np.uint32), FLOATS.view(np.uint32)[:15] ^ 1)
    low = run_elementwise(lambda x: T.call_pure_extern("float32", "low_half", x), "float32", bits)
    high = run_elementwise(lambda x: T.call_pure_extern("float32", "high_half", x), "float32", bits)
    halves = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(np.stack([low, high], 1).ravel(), halves)
    whole = np.arange(0, 0x7C00, 37, dtype=np.uint16)
    np.testing.assert_array_equal(
        run_elementwise(lambda x: T.reinterpret("float16", x), "float16", whole), whole.view(np.float16)
    )
    back = run_elementwise(lambda x: T.reinterpret("int16", x), "int16", whole.view(np.float16))
    np.testing.assert_array_equal(back, whole.view(np.int16))


def test_bits() -> None:
    a = integers("uint32")
    counts = [int(x).bit_count() + 64 * (32 - int(x).bit_length()) for x in a]
    got = run_elementwise(
        lambda x: tirx.popcount(x).astype("int32") + tirx.clz(x).astype("int32") * 64, "int32", a
    )
    np.testing.assert_array_equal(got, counts)
    np.testing.assert_array_equal(run_elementwise(lambda x: ~x, "uint32", a), ~a)


def test_a_guarded_load_is_not_made() -> None:
    """The index is valid only where the condition holds: lavapipe would fault at 2^29 elements beyond."""
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


def finished(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """For our own lowering, which leaves barriers as they are written."""
    return select(func, [str(param.name) for param in func.params], "kernel")


def test_barriers_and_shared_memory() -> None:
    """Each workgroup reverses its part and adds it up: 96 threads, several subgroups; also int64, bool."""
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
    """From a storage buffer and from workgroup memory that changes between two loads of the same four."""
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
