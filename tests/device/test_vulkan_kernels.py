"""SPIR-V of single operations against NumPy, on a Vulkan device (lavapipe on a machine without a GPU)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script import tirx as T

from nearfar.targets.gpu.kernels.common import select
from tests.support.vulkan_run import launch

RNG = np.random.default_rng(2)
N = 77  # no multiple of the workgroup's size
NAN, INF = float("nan"), float("inf")
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.5, 1e-3, 700.0, -700.0, 1e10, -1e10, INF, -INF, NAN], np.float32
)


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
    """Run each operation over its row of the arrays, by one kernel, because compilation takes most of the
    time.
    """
    func = elementwise(computes, [str(a.dtype) for a in arrays], out, arrays[0].shape[-1])
    return launch(func, *arrays, np.zeros(arrays[0].shape, out))


def run_elementwise(compute: Compute, out: str, *arrays: np.ndarray) -> np.ndarray:
    """Run one operation over arrays."""
    return run_rows([compute], out, *(array[None] for array in arrays))[0]


def integers(dtype: str) -> np.ndarray:
    """N numbers over the whole range, with its ends and small numbers."""
    info = np.iinfo(dtype)
    ends = [info.min, info.max, info.min + 1, info.max - 1, 0, 1, 2, 3, 5, 7]
    ends += [-1, -2, -3, -5, -7, -8, -9] if info.min else [8, 9, 16, 100]
    spread = RNG.integers(info.min, info.max, N - len(ends), dtype=dtype, endpoint=True)
    return np.concatenate([np.array(ends, dtype), spread])


def divisors(dtype: str) -> np.ndarray:
    """Numbers of both signs and many sizes, without 0 and -1 (the lowest number divided by -1 overflows)."""
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
    """The found and the expected results of each operation on numbers of a type."""
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
    """Casts are those of WGSL: towards zero; a number out of range becomes the nearest end, a NaN
    becomes 0.
    """
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
    """Includes infinities and NaNs, except where Vulkan leaves the result to the device: min and max of a NaN
    and a number, and quotients of float16 by more than 2^14.
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
    """The results of each operation on all pairs."""
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
    """The results of each comparison of all pairs."""
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
    """Numbers, and the results of each function on them."""
    a = np.concatenate([FLOATS, RNG.uniform(-8, 8, 40).astype(np.float32), np.float32([88, 1e-30, 3e38])])
    computes = [compute for compute, _ in FUNCTIONS.values()]
    found = run_rows(computes, "float32", *repeated(len(computes), a))
    return a, dict(zip(FUNCTIONS, found, strict=True))


def test_functions_of_float16() -> None:
    a = RNG.uniform(0.5, 8, N).astype(np.float16)  # near 0.27 the two terms cancel
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
