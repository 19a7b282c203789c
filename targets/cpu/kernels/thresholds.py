"""The thresholds of top-k and top-p without a sort: count in bins, then look into the bin with the threshold.

Tokens are counted in bins by their distance from the largest l, and so are their masses exp(l − max). The
threshold is in the bin in which a sum from above reaches the wanted amount; the tokens of that bin are
listed, and the threshold is found among them, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.greedy import CHUNKS

Expr = Any
BINS = 256
FINE = 16.0
"""Bins in a unit of l. The last bin has all tokens below, each with less than 2⁻²² of the mass."""
COPIES = 4
"""Copies of the counts, which lanes use in turn: with one copy, tokens in the same bin would wait for each
other.
"""
NEG_INF = float("-inf")


def _bin(x: Expr, top: Expr) -> Expr:
    """The bin of each lane. It is monotonic in x, and in range for every x, since it is an index."""
    below = tirx.min((v.splat(top) - x) * v.splat(FINE), v.splat(float(BINS - 1)))
    return T.Bind(v.cast(tirx.max(below, v.splat(0.0)), v.I32X16))


def count(logit: Expr, counts: Expr, r: Expr, c: Expr, top: Expr, width: int) -> None:
    """Count a chunk: `counts` [row, chunk] gets the number of tokens in each bin, and their masses."""
    copies = v.local((COPIES, BINS, 2), "float32")
    flat = T.decl_buffer((COPIES, 2 * BINS), "float32", data=copies.data, scope="local")
    with T.serial(0, COPIES) as copy, T.serial(0, 2 * BINS // v.LANES) as i:
        v.put(flat, [copy, i * v.LANES], v.splat(0.0))
    bins, masses, some = (
        v.local((v.LANES,), "int32"),
        v.local((v.LANES,), "float32"),
        v.local((v.LANES,), "float32"),
    )
    beyond, mass_beyond = v.registers(1), v.registers(1)
    v.put1(beyond, [0], v.splat(0.0))
    v.put1(mass_beyond, [0], v.splat(0.0))
    with T.serial(0, width // v.LANES) as i:
        x = v.lanes(logit, [r, c * width + i * v.LANES])
        there = x > v.splat(NEG_INF)
        mass = T.Bind(tirx.Select(there, v.exp(x - v.splat(top)), v.splat(0.0)))
        one = T.Bind(tirx.Select(there, v.splat(1.0), v.splat(0.0)))
        with T.If(v.hmax(x) > top - v.f32((BINS - 1) / FINE)):
            with T.Then():
                v.put(bins, [0], _bin(x, top))
                v.put(masses, [0], mass)
                v.put(some, [0], one)
                for lane in range(v.LANES):
                    at, copy = T.Bind(bins[lane]), lane % COPIES
                    v.put1(copies, [copy, at, 0], copies[copy, at, 0] + some[lane])
                    v.put1(copies, [copy, at, 1], copies[copy, at, 1] + masses[lane])
            with T.Else():
                v.put1(beyond, [0], beyond[0] + one)
                v.put1(mass_beyond, [0], mass_beyond[0] + mass)
    for which, rest in enumerate((beyond, mass_beyond)):
        v.put1(copies, [0, BINS - 1, which], copies[0, BINS - 1, which] + v.hsum(rest[0]))
        with T.serial(0, BINS) as at:
            total = copies[0, at, which]
            for copy in range(1, COPIES):
                total = total + copies[copy, at, which]
            v.put1(counts, [r, c, which, at], total)


def limit(buf: dict[str, Expr], r: Expr, top: Expr, width: int) -> None:
    """Steps 6 to 8: write the least l that row r keeps to scratch:5."""
    k, top_p, min_p = (
        T.Bind(buf["sample_i32"][r, 1]),
        T.Bind(buf["sample_f32"][r, 1]),
        T.Bind(buf["sample_f32"][r, 2]),
    )
    least, kept, found = (v.scalar("float32") for _ in range(3))
    v.put1(least, [0], v.f32(NEG_INF))
    bins = v.local((2, BINS), "float32")
    with T.If(tirx.any(k > 0, top_p < v.f32(1.0))), T.Then():
        _add_up(buf["scratch:3"], bins, r)
        _total(bins, kept)
    with T.If(k > 0), T.Then():
        wanted = T.Bind(tirx.Cast("float32", k))
        _find(buf, r, top, width, bins, 0, wanted, least, kept)
    with T.If(top_p < v.f32(1.0)), T.Then():
        wanted = T.Bind(kept[0] * top_p)
        _find(buf, r, top, width, bins, 1, wanted, found, None)
        v.put1(least, [0], tirx.max(found[0], least[0]))
    with T.If(min_p > v.f32(0.0)), T.Then():
        v.put1(least, [0], tirx.max(least[0], top + tirx.log(min_p)))
    # The token with the largest logit is always kept.
    v.put1(buf["scratch:5"], [r], tirx.min(least[0], top))


def _add_up(counts: Expr, bins: Expr, r: Expr) -> None:
    """Add up a row's bins over its chunks, in order."""
    for which in range(2):
        with T.serial(0, BINS // v.LANES) as i:
            total = v.registers(1)
            v.put1(total, [0], v.splat(0.0))
            with T.serial(0, CHUNKS) as c:
                v.put1(total, [0], total[0] + v.lanes(counts, [r, c, which, i * v.LANES]))
            v.put(bins, [which, i * v.LANES], total[0])


def _total(bins: Expr, kept: Expr) -> None:
    """Store the mass of all tokens in `kept`."""
    v.put1(kept, [0], v.f32(0.0))
    with T.serial(0, BINS) as i:
        v.put1(kept, [0], kept[0] + bins[1, i])


def _find(
    buf: dict[str, Expr], r: Expr, top: Expr, width: int, bins: Expr, which: int, wanted: Expr, found: Expr,
    kept: Expr | None,
) -> None:  # fmt: skip
    """Find the largest l such that the tokens at or above it reach `wanted` in number (which 0) or in mass
    (which 1).

    It goes into `found`, or -inf if all tokens together do not reach it. `kept`: gets the mass at or above
    it.
    """
    at, above = v.scalar("int32"), v.local((2,), "float32")
    v.put1(at, [0], v.i32(BINS))
    for one in range(2):
        v.put1(above, [one], v.f32(0.0))
    with T.serial(0, BINS) as i:
        v.put1(at, [0], tirx.Select(above[which] + bins[which, i] >= wanted, tirx.min(at[0], i), at[0]))
        with T.If(i < at[0]), T.Then():
            for one in range(2):
                v.put1(above, [one], above[one] + bins[one, i])
    v.put1(found, [0], v.f32(NEG_INF))
    with T.If(at[0] < BINS), T.Then():
        n, smallest = _list(buf["scratch:0"], buf["scratch:4"], r, top, T.Bind(at[0]), width)

        def measure(one: int, least: Expr) -> Expr:
            return T.Bind(above[one] + _sum_from(buf["scratch:4"], r, n, top, one, least))

        _bisect(found, lambda least: measure(which, least), lambda: wanted)
        # Sums in two orders differ in their last bits, but the bin is known to reach the wanted sum.
        v.put1(found, [0], tirx.max(found[0], smallest))
        if kept is not None:
            v.put1(kept, [0], measure(1, T.Bind(found[0])))


def _list(logit: Expr, listed: Expr, r: Expr, top: Expr, at: Expr, width: int) -> tuple[Expr, Expr]:
    """List the finite l of a bin, padded to whole vectors with -inf; returns the number of vectors, and the
    least l.
    """
    n, smallest = v.scalar("int32"), v.scalar("float32")
    v.put1(n, [0], v.i32(0))
    v.put1(smallest, [0], v.f32(float("inf")))
    values = v.local((v.LANES,), "float32")
    inside = v.local((v.LANES,), "int32")
    with T.serial(0, CHUNKS * width // v.LANES) as i:
        x = v.lanes(logit, [r, i * v.LANES])
        mine = tirx.all(tirx.EQ(_bin(x, top), v.splat(at)), x > v.splat(NEG_INF))
        with T.If(v.hmax(T.Bind(tirx.Select(mine, v.splat(1.0), v.splat(0.0)))) > v.f32(0.0)), T.Then():
            v.put(values, [0], x)
            v.put(inside, [0], tirx.Select(mine, v.isplat(1), v.isplat(0)))
            for lane in range(v.LANES):
                value = T.Bind(values[lane])
                v.put1(listed, [r, n[0]], value)
                with T.If(inside[lane] > 0), T.Then():
                    v.put1(n, [0], n[0] + 1)
                    v.put1(smallest, [0], tirx.min(smallest[0], value))
    v.put(listed, [r, n[0]], v.splat(NEG_INF))
    return T.Bind((n[0] + (v.LANES - 1)) // v.LANES), T.Bind(smallest[0])


def _sum_from(listed: Expr, r: Expr, n: Expr, top: Expr, which: int, least: Expr) -> Expr:
    """The number of values in n listed vectors that are at least `least`, or their mass (which 1)."""
    total = v.registers(1)
    v.put1(total, [0], v.splat(0.0))
    with T.serial(0, n) as i:
        x = v.lanes(listed, [r, i * v.LANES])
        one = v.exp(x - v.splat(top)) if which else v.splat(1.0)
        v.put1(total, [0], total[0] + tirx.Select(x >= v.splat(least), one, v.splat(0.0)))
    return v.hsum(total[0])


def _bisect(found: Expr, measure: Callable[[Expr], Expr], wanted: Callable[[], Expr]) -> None:
    """Store in `found` the largest float t with measure(t) ≥ wanted, or -inf.

    The search is bit by bit, over integers in the order of the floats.
    """
    # The keys are int64, because TVM's simplifier negates the bounds of comparisons, which uint32 constants
    # cannot be (0.27).
    lowest, highest = (
        tirx.IntImm("int64", 0x007FFFFF),
        tirx.IntImm("int64", 0xFF800000),
    )  # the keys of -inf and inf; the keys of NaNs lie beyond
    key = v.scalar("int64")
    v.put1(key, [0], tirx.IntImm("int64", 0))
    with T.serial(0, 32) as i:
        candidate = T.Bind(key[0] + (tirx.IntImm("int64", 0x80000000) >> tirx.Cast("int64", i)))
        with T.If(candidate <= lowest), T.Then():
            v.put1(key, [0], candidate)
        with T.If(tirx.all(candidate > lowest, candidate <= highest)), T.Then():
            total = measure(_from_key(candidate))
            with T.If(total >= wanted()), T.Then():
                v.put1(key, [0], candidate)
    v.put1(found, [0], _from_key(key[0]))


def _from_key(key: Expr) -> Expr:
    """The float for the integer `key`; keys are in the order of the floats."""
    sign = tirx.IntImm("int64", 0x80000000)
    ones = tirx.IntImm("int64", 0xFFFFFFFF)
    return T.Bind(v.bits(v.cast(tirx.Select(key >= sign, key - sign, ones - key), "uint32"), "float32"))
