"""A small vector vocabulary over TVM's IR builder: vectors have sixteen values, whatever a register holds.

LLVM splits them into the unit's registers (targets/cpu/units.py): one, two or four. So sums over lanes have
sixteen partial sums, added in one order, on every unit.

Kernels are written with the builder rather than as TVMScript because most of them are families (bits, group,
rows, gated, …): Python loops unroll, Python ifs specialize, and what remains in the IR is straight vector
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from nearfar.kernels.contract import SHARED_FROM
from nearfar.targets.llvm.exponential import exponential

LANES = 16
ROWS = LANES  # output rows of a packed block: a vector of accumulators
Expr = Any  # tirx expressions carry their operators at run time only

I32X16, U32X16, F32X16 = "int32x16", "uint32x16", "float32x16"


def prim_func(
    name: str, args: Sequence[tuple[str, Sequence[Any], str]], body: Callable[..., None]
) -> tirx.PrimFunc:
    """Build a PrimFunc whose buffers are `args` (name, shape, dtype); `body` receives them in order."""
    with IRBuilder() as builder:
        with T.prim_func(private=False):
            T.func_name(name)
            body(*[T.arg(arg, T.buffer(tuple(shape), dtype)) for arg, shape, dtype in args])
        func: tirx.PrimFunc = builder.get()
    return func.with_attr("tirx.noalias", True)


def rows(m: Expr) -> Any:
    """A loop over rows that cost little each: parallel from 16 rows on, because waking a thread takes time
    too.
    """
    if isinstance(m, int):
        return parallel(m) if m >= SHARED_FROM else T.serial(0, m)
    return parallel(m, tirx.Select(m < SHARED_FROM, i32(1), m))


def parallel(extent: Expr, told: Expr | None = None) -> Any:
    """A loop whose turns the threads share.

    The pool gets the number of turns, so that each thread gets an equal number of neighbouring turns
    (runtime/pool.c). One turn wakes no thread; `told` replaces the number, so that 1 keeps the loop in one
    thread.
    """
    T.evaluate(tirx.call_extern("int32", "nf_extent", _int(extent if told is None else told)))
    return T.parallel(0, extent)


def lanes(buf: Expr, index: Sequence[Any], n: int = LANES) -> Expr:
    """Load n consecutive elements that start at `index`."""
    return T.Bind(buf[(*index[:-1], tirx.Ramp(_int(index[-1]), 1, n) if n > 1 else index[-1])])


def put(buf: Expr, index: Sequence[Any], value: Expr, n: int = LANES) -> None:
    """Store n consecutive elements that start at `index`."""
    T.buffer_store(buf, value, [*index[:-1], tirx.Ramp(_int(index[-1]), 1, n)])


def prefetch(buf: Expr, index: Sequence[Any]) -> None:
    """Prefetch the cache line of an element that will be read soon."""
    where = tirx.address_of(buf[tuple(index)])
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", where, i32(0), i32(3), i32(1)))


def some(buf: Expr, index: Sequence[Any], count: int) -> Expr:
    """Sixteen float32 lanes, the first `count` loaded from `index` on; the others are 0 and not read."""
    if count == LANES:
        return lanes(buf, index)
    filled = local((LANES,), "float32")
    for i in range(LANES):
        put1(filled, [i], buf[(*index[:-1], index[-1] + i)] if i < count else f32(0.0))
    return lanes(filled, [0])


def put_some(buf: Expr, index: Sequence[Any], value: Expr, count: int) -> None:
    """Store the first `count` of sixteen lanes, float32."""
    if count == LANES:
        return put(buf, index, value)
    filled = local((LANES,), "float32")
    put(filled, [0], value)
    for i in range(count):
        put1(buf, [*index[:-1], index[-1] + i], filled[i])


def put1(buf: Expr, index: Sequence[Any], value: Expr) -> None:
    """Store one element (one vector, if that is what the buffer holds)."""
    T.buffer_store(buf, value, list(index))


def _int(value: Any) -> Expr:
    return tirx.IntImm("int32", value) if isinstance(value, int) else value


def f32(value: float) -> Expr:
    """A float32 constant."""
    return tirx.FloatImm("float32", value)


def i32(value: int) -> Expr:
    """An int32 constant."""
    return tirx.IntImm("int32", value)


def splat(value: Any, n: int = LANES) -> Expr:
    """A vector whose lanes all hold `value` (a Python float means float32)."""
    return tirx.Broadcast(f32(value) if isinstance(value, float) else value, n)


def isplat(value: int, dtype: str = "int32", n: int = LANES) -> Expr:
    """A vector whose lanes all hold an integer constant."""
    return tirx.Broadcast(tirx.IntImm(dtype, value), n)


def cast(value: Expr, dtype: str) -> Expr:
    """Convert values lane by lane."""
    return tirx.Cast(dtype, value)


def bits(value: Expr, dtype: str) -> Expr:
    """The bits of `value` read as another type."""
    return tirx.reinterpret(dtype, value)


def local(shape: Sequence[int], dtype: str) -> Expr:
    """An array on the stack; without the annotation TVM 0.27 calls the allocator from 64 bytes on."""
    return T.alloc_buffer(tuple(shape), dtype, scope="local", annotations={"disable_lower_builtin": True})


def registers(n: int, dtype: str = F32X16) -> Expr:
    """Storage for n vectors; constant indices make LLVM keep them in registers."""
    return local((n,), dtype)


def scalar(dtype: str) -> Expr:
    """Storage for one scalar variable (index 0)."""
    return local((1,), dtype)


def intrin(dtype: str, name: str, *args: Expr) -> Expr:
    """Call a pure LLVM intrinsic."""
    return tirx.call_llvm_pure_intrin(dtype, name, *args)


def halves(value: Expr, dtype: str) -> tuple[Expr, Expr]:
    """Low and high half of a vector, each of type `dtype`."""
    return tirx.vectorlow(dtype, value), tirx.vectorhigh(dtype, value)


def hreduce(value: Expr, op: Callable[[Expr, Expr], Expr], base: str = "float32", n: int = LANES) -> Expr:
    """Reduce the lanes pairwise, in a fixed order, so that every run has the same result."""
    while n > 2:
        n //= 2
        low, high = halves(value, f"{base}x{n}")
        value = T.Bind(op(low, high))
    return T.Bind(op(tirx.Shuffle([value], [0]), tirx.Shuffle([value], [1])))


def components(width: int, body: Callable[[Expr, int], None]) -> None:
    """Call body(start, lanes) over `width` components: whole vectors, then parts of a vector for the
    remainder.
    """
    with T.serial(0, width // LANES) as i:
        body(i * LANES, LANES)
    for start, n in rest(width):
        body(start, n)


def rest(width: int) -> list[tuple[Expr, int]]:
    """(start, lanes) of the parts that remain of an even width after whole vectors."""
    at, lanes = width - width % LANES, LANES // 2
    pieces: list[tuple[Expr, int]] = []
    while lanes >= 2:
        if width - at >= lanes:
            pieces.append((i32(at), lanes))
            at += lanes
        lanes //= 2
    return pieces


def hsum(value: Expr) -> Expr:
    """Sum of sixteen float32 lanes."""
    return hreduce(value, lambda a, b: a + b)


def hmax(value: Expr) -> Expr:
    """Largest of sixteen float32 lanes."""
    return hreduce(value, tirx.max)


def exp(x: Expr) -> Expr:
    """e^x on sixteen lanes; libm's expf is scalar and would take 16 calls. NaN gives a number."""
    return exponential(x, T.Bind, LANES)


def keep(value: Expr, dtype: str = F32X16) -> Expr:
    """Keep a value in a register: TVM's passes inline bindings, and a chain of values used twice doubles at
    every link.

    (With plain bindings in `log` the sampler compiles in 2.5 s instead of 0.1 s.)
    """
    register = local((2,), dtype)
    put1(register, [0], value)
    return register[0]


def log(x: Expr) -> Expr:
    """Natural logarithm of sixteen positive normal numbers, within 2 ulp also near 1; used for Gumbel noise.

    x = 2^e · m, m in [√½, √2); log m by Cephes' minimax polynomial in m − 1, ln 2 in two parts.
    """
    whole = keep(bits(x, I32X16), I32X16)
    e = keep((whole - isplat(0x3F3504F3)) >> isplat(23), I32X16)  # the bits of √½
    r = keep(bits(whole - (e << isplat(23)), F32X16) - splat(1.0))
    exponent, square = cast(e, F32X16), keep(r * r)
    poly = splat(7.0376836292e-2)
    for coefficient in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        poly = T.Bind(poly * r + splat(coefficient))
    tail = T.Bind(poly * r * square + exponent * splat(-2.12194440e-4) - square * splat(0.5))
    return keep(r + tail + exponent * splat(0.693359375))


def log1p(x: Expr) -> Expr:
    """log(1 + x) of sixteen numbers from 0 to 1, with a small error also near 0.

    What 1 + x loses by rounding is put back by a factor, x over the rounded sum − 1 (Goldberg, 1991, theorem
    4).
    """
    x = keep(x)
    rounded = keep(x + splat(1.0))
    more = keep(rounded - splat(1.0))
    return T.Bind(tirx.Select(more > splat(0.0), log(rounded) * (x / more), x))
