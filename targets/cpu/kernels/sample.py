"""The full sampler of docs/artifact.md: penalties, mask, temperature, top-k, top-p, min-p, Gumbel argmax.

No sort: thresholds are found by bisection over the bits of ordered floats, 32 passes over a row that stays in
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sampler import COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.greedy import Args, Best, _build, _finish, _iota, _padded
from nearfar.targets.cpu.units import Unit
from nearfar.targets.jobs import Sample
from nearfar.targets.kernels import Staged

Expr = Any
NEG_INF = float("-inf")


def sample(job: Sample, unit: Unit) -> Staged:
    """See Sample."""
    rows, vocab, slots = job.rows, job.vocab, job.slots
    width = _padded(vocab)
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sample_f32", (MAX_ROWS, COLUMNS), "float32"),
        ("sample_i32", (MAX_ROWS, COLUMNS), "int32"),
        ("logit_bias", (slots, vocab), "float32"),
        ("counts", (slots, vocab), "int32"),
        ("allowed", (slots, (vocab + 31) // 32), "uint32"),
        ("scratch:0", (rows, width), "float32"),
        ("scratch:1", (rows, width), "float32"),
        ("sampled", (MAX_ROWS,), "int32"),
        ("tokens", (MAX_STEP,), "int32"),
    ]

    def row(buf: dict[str, Expr], r: Expr) -> None:
        slot = T.Bind(buf["sample_i32"][r, 0])
        with T.If(slot >= 0), T.Then():
            _adjust(buf, r, slot, vocab)
            token = v.scalar("int32")
            temperature = T.Bind(buf["sample_f32"][r, 0])
            with T.If(temperature <= v.f32(0.0)):
                with T.Then():
                    best = Best()
                    with T.serial(0, width // v.LANES) as i:
                        best.offer(v.lanes(buf["scratch:0"], [r, i * v.LANES]), i * v.LANES)
                    v.put1(token, [0], best.token())
                with T.Else():
                    _draw(buf, r, temperature, token, width)
            _finish(buf, r, token[0])
            with T.If(token[0] >= 0), T.Then():
                v.put1(buf["counts"], [slot, token[0]], buf["counts"][slot, token[0]] + 1)

    return _build("sample", args, rows, row, scratch=2)


def _adjust(buf: dict[str, Expr], r: Expr, slot: Expr, vocab: int) -> None:
    """Steps 1 to 4 into scratch:0; what is not finite, and the end of the padded row, is -inf."""
    repetition, presence, frequency = (T.Bind(buf["sample_f32"][r, i]) for i in (3, 4, 5))

    def adjusted(
        logit: Expr,
        bias: Expr,
        count: Expr,
        allowed: Expr,
        splat: Callable[[Expr], Expr],
        typed: Callable[[str], str],
    ) -> Expr:
        x = T.Bind(tirx.Select(allowed, logit + bias, splat(v.f32(NEG_INF))))
        penal = tirx.Select(x > splat(v.f32(0.0)), x / splat(repetition), x * splat(repetition))
        x = T.Bind(tirx.Select(tirx.NE(count, splat(v.i32(0))), penal, x))
        generated = T.Bind(count & splat(v.i32(0xFFFFFF)))
        flat = tirx.Select(generated > splat(v.i32(0)), splat(presence), splat(v.f32(0.0)))
        x = T.Bind(x - (splat(frequency) * v.cast(generated, typed("float32")) + flat))
        return T.Bind(tirx.Select(x < splat(v.f32(float("inf"))), x, splat(v.f32(NEG_INF))))

    full = vocab // v.LANES
    with T.serial(0, full) as i:
        at = i * v.LANES
        word = T.Bind(buf["allowed"][slot, at // 32])
        shift = T.Bind(v.splat(tirx.Cast("uint32", at % 32)) + v.cast(_iota(), v.U32X16))
        bit = tirx.NE((v.splat(word) >> shift) & v.isplat(1, "uint32"), v.isplat(0, "uint32"))
        loads = (
            v.lanes(buf["logits"], [r, at]),
            v.lanes(buf["logit_bias"], [slot, at]),
            v.lanes(buf["counts"], [slot, at]),
        )
        v.put(buf["scratch:0"], [r, at], adjusted(*loads, bit, v.splat, lambda base: f"{base}x{v.LANES}"))
    for at in range(full * v.LANES, _padded(vocab)):
        if at >= vocab:
            v.put1(buf["scratch:0"], [r, at], v.f32(NEG_INF))
            continue
        word = (buf["allowed"][slot, at // 32] >> tirx.IntImm("uint32", at % 32)) & tirx.IntImm("uint32", 1)
        loads = (buf["logits"][r, at], buf["logit_bias"][slot, at], buf["counts"][slot, at])
        v.put1(
            buf["scratch:0"],
            [r, at],
            adjusted(*loads, tirx.NE(word, tirx.IntImm("uint32", 0)), lambda x: x, lambda base: base),
        )


def _draw(buf: dict[str, Expr], r: Expr, temperature: Expr, token: Expr, width: int) -> None:
    """Steps 5 to 9. scratch:0 holds l, scratch:1 exp(l - max)."""
    logit, mass, n = buf["scratch:0"], buf["scratch:1"], width // v.LANES
    highest = v.registers(1)
    v.put1(highest, [0], v.splat(NEG_INF))
    with T.serial(0, n) as i:
        x = T.Bind(v.lanes(logit, [r, i * v.LANES]) / v.splat(temperature))
        v.put(logit, [r, i * v.LANES], x)
        v.put1(highest, [0], tirx.Select(x > highest[0], x, highest[0]))
    top = v.hmax(highest[0])
    with T.serial(0, n) as i:
        x = v.lanes(logit, [r, i * v.LANES])
        v.put(
            mass, [r, i * v.LANES], tirx.Select(x > v.splat(NEG_INF), v.exp(x - v.splat(top)), v.splat(0.0))
        )
    limit = v.scalar("float32")
    v.put1(limit, [0], v.f32(NEG_INF))
    k, top_p, min_p = (
        T.Bind(buf["sample_i32"][r, 1]),
        T.Bind(buf["sample_f32"][r, 1]),
        T.Bind(buf["sample_f32"][r, 2]),
    )
    with T.If(k > 0), T.Then():
        wanted = T.Bind(tirx.Cast("float32", k))
        _bisect(limit, lambda at: _sum_from(logit, None, r, at, n), lambda: wanted)
    with T.If(top_p < v.f32(1.0)), T.Then():
        kept = T.Bind(_sum_from(logit, mass, r, limit[0], n) * top_p)
        start = T.Bind(limit[0] + v.f32(0.0))
        found = v.scalar("float32")
        _bisect(found, lambda at: _sum_from(logit, mass, r, at, n), lambda: kept)
        v.put1(limit, [0], tirx.max(found[0], start))
    with T.If(min_p > v.f32(0.0)), T.Then():
        v.put1(limit, [0], tirx.max(limit[0], top + tirx.log(min_p)))
    best = Best()
    with T.serial(0, n) as i:
        x = v.lanes(logit, [r, i * v.LANES])
        kept_lanes = x >= v.splat(limit[0])
        noisy = T.Bind(x + gumbel(buf["sample_i32"], r, i * v.LANES))
        best.offer(T.Bind(tirx.Select(kept_lanes, noisy, v.splat(NEG_INF))), i * v.LANES)
    v.put1(token, [0], best.token())


def _sum_from(logit: Expr, mass: Expr | None, r: Expr, at: Expr, n: int) -> Expr:
    """Σ mass (or the count, where mass is None) over l ≥ at."""
    total = v.registers(1)
    v.put1(total, [0], v.splat(0.0))
    with T.serial(0, n) as i:
        one = v.splat(1.0) if mass is None else v.lanes(mass, [r, i * v.LANES])
        inside = v.lanes(logit, [r, i * v.LANES]) >= v.splat(at)
        v.put1(total, [0], total[0] + tirx.Select(inside, one, v.splat(0.0)))
    return v.hsum(total[0])


def _bisect(found: Expr, measure: Callable[[Expr], Expr], wanted: Callable[[], Expr]) -> None:
    """Store in `found` the largest float t with measure(t) ≥ wanted, or -inf.

    Bit by bit over ordered integers.
    """
    # int64 keys: TVM's simplifier negates the bounds of comparisons, which uint32 constants cannot stand
    # (0.27).
    lowest, highest = (
        tirx.IntImm("int64", 0x007FFFFF),
        tirx.IntImm("int64", 0xFF800000),
    )  # the keys of -inf and inf; NaNs beyond
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
    """The float whose bits, ordered as the numbers are, make the integer `key`."""
    sign = tirx.IntImm("int64", 0x80000000)
    ones = tirx.IntImm("int64", 0xFFFFFFFF)
    return T.Bind(v.bits(v.cast(tirx.Select(key >= sign, key - sign, ones - key), "uint32"), "float32"))


def gumbel(params: Expr, r: Expr, start: Expr) -> Expr:
    """−log(−log(u)) of tokens start … start+15, u from pcg4d(seed low, seed high, counter, token)."""

    def word(value: Expr) -> Expr:
        return T.Bind(
            v.splat(
                tirx.Cast("uint32", value) * tirx.IntImm("uint32", 1664525)
                + tirx.IntImm("uint32", 1013904223)
            )
        )

    x, y, z = word(params[r, 2]), word(params[r, 3]), word(params[r, 4])
    w = T.Bind(
        v.cast(v.splat(start) + _iota(), v.U32X16) * v.isplat(1664525, "uint32")
        + v.isplat(1013904223, "uint32")
    )
    x, y, z, w = _mix(x, y, z, w)
    x, y, z, w = (T.Bind(a ^ (a >> v.isplat(16, "uint32"))) for a in (x, y, z, w))
    x = _mix(x, y, z, w)[0]
    high = v.cast(v.cast(x >> v.isplat(8, "uint32"), v.I32X16), v.F32X16)
    # In float32 (h + 0.5)·2^-24 rounds to 1 for the largest h, whose gumbel would be infinite: keep below 1.
    u = v.keep(tirx.min((high + v.splat(0.5)) * v.splat(2.0**-24), v.splat(1 - 2.0**-24)))
    return T.Bind(v.splat(0.0) - v.log(v.splat(0.0) - v.log(u)))


def _mix(x: Expr, y: Expr, z: Expr, w: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    x = T.Bind(x + y * w)
    y = T.Bind(y + z * x)
    z = T.Bind(z + x * y)
    return x, y, z, T.Bind(w + y * z)
