"""The full sampler of docs/artifact.md: penalties, mask, temperature, top-k, top-p, min-p, Gumbel argmax.

Tasks share the chunks of a row: one pass over the logits, another that counts if top-k or top-p is on
(thresholds.py), and one that draws, which skips the noise of tokens that cannot win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sampler import BOUND, COLDEST, COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.contract import Staged
from nearfar.kernels.jobs import Sample
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened_rows
from nearfar.targets.cpu.kernels.greedy import (
    CHUNKS,
    Args,
    Best,
    build,
    chunk,
    chunks,
    finish,
    iota,
)
from nearfar.targets.cpu.kernels.thresholds import BINS, count, limit
from nearfar.targets.cpu.units import Unit

Expr = Any
NEG_INF = float("-inf")
HIGHEST = 3.4028234663852886e38  # the largest float32
INFINITE = 0x7F800000  # the bits of infinity
NOISE = 19.6
"""Upper bound of the difference between the largest and the smallest noise: −log 2⁻²⁴ + log(−log 2⁻²⁵) =
19.49.
"""


def sample(job: Sample, unit: Unit) -> Staged:
    """The launches of a Sample job.

    scratch: l of each token; the chunks' best value, then its token; counts; listed values; the least l that
    is kept; the largest l.
    """
    rows, vocab, slots = opened_rows(job).rows, job.vocab, job.slots
    width = chunk(vocab) * CHUNKS
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sample_f32", (MAX_ROWS, COLUMNS), "float32"),
        ("sample_i32", (MAX_ROWS, COLUMNS), "int32"),
        ("logit_bias", (slots, vocab), "float32"),
        ("counts", (slots, vocab), "int32"),
        ("allowed", (slots, (vocab + 31) // 32), "uint32"),
        ("scratch:0", (rows, width), "float32"),
        ("scratch:1", (rows, CHUNKS), "float32"),
        ("scratch:2", (rows, CHUNKS), "int32"),
        ("scratch:3", (rows, CHUNKS, 2, BINS), "float32"),
        ("scratch:4", (rows, width + v.LANES), "float32"),
        ("scratch:5", (rows,), "float32"),
        ("scratch:6", (rows,), "float32"),
        ("sampled", (MAX_ROWS,), "int32"),
        ("tokens", (MAX_STEP,), "int32"),
    ]

    def body(buf: dict[str, Expr]) -> None:
        def draws(r: Expr) -> Expr:
            return tirx.all(buf["sample_i32"][r, 0] >= 0, _is_drawn(buf["sample_f32"][r, 0]))

        def cuts(r: Expr) -> Expr:
            some = tirx.any(buf["sample_i32"][r, 1] > 0, buf["sample_f32"][r, 1] < v.f32(1.0))
            return tirx.all(draws(r), some)

        with chunks(rows) as (r, c):
            slot = T.Bind(buf["sample_i32"][r, 0])
            with T.If(slot >= 0), T.Then():
                _adjust(buf, r, slot, c, vocab)
        with chunks(rows) as (r, c), T.If(cuts(r)), T.Then():
            count(buf["scratch:0"], buf["scratch:3"], r, c, _top(buf, r), chunk(vocab))
        with v.parallel(rows) as r, T.If(draws(r)), T.Then():
            top = _top(buf, r)
            v.put1(buf["scratch:6"], [r], top)
            limit(buf, r, top, chunk(vocab))
        with chunks(rows) as (r, c), T.If(draws(r)), T.Then():
            _draw(buf, r, c, vocab)
        with T.serial(0, rows) as r:
            slot = T.Bind(buf["sample_i32"][r, 0])
            with T.If(slot >= 0), T.Then():
                token = _best(buf, r)
                finish(buf, r, token)
                with T.If(token >= 0), T.Then():
                    v.put1(buf["counts"], [slot, token], buf["counts"][slot, token] + 1)

    return build(job, args, body)


def _top(buf: dict[str, Expr], r: Expr) -> Expr:
    """The largest l of a row, from the chunks' best values before anything is drawn."""
    highest = v.scalar("float32")
    v.put1(highest, [0], v.f32(NEG_INF))
    with T.serial(0, CHUNKS) as c:
        v.put1(highest, [0], tirx.max(highest[0], buf["scratch:1"][r, c]))
    return T.Bind(highest[0])


def _best(buf: dict[str, Expr], r: Expr) -> Expr:
    """The token of the best chunk, the first on ties; −1 if no chunk has one."""
    value, token = v.scalar("float32"), v.scalar("int32")
    v.put1(value, [0], v.f32(NEG_INF))
    v.put1(token, [0], v.i32(-1))
    with T.serial(0, CHUNKS) as c, T.If(buf["scratch:1"][r, c] > value[0]), T.Then():
        v.put1(value, [0], buf["scratch:1"][r, c])
        v.put1(token, [0], buf["scratch:2"][r, c])
    return T.Bind(token[0])


def _is_drawn(temperature: Expr) -> Expr:
    """Whether a temperature is above 0: its bits decide, because kernels take subnormal numbers as zero."""
    bits = v.bits(temperature, "int32")
    return tirx.all(bits > v.i32(0), bits <= v.i32(INFINITE))


def _adjust(buf: dict[str, Expr], r: Expr, slot: Expr, c: Expr, vocab: int) -> None:
    """Write steps 1 to 5 of a chunk to scratch:0, and the chunk's best value. Values that are not finite, or
    past the vocabulary, become -inf.
    """
    repetition, presence, frequency = (T.Bind(buf["sample_f32"][r, i]) for i in (3, 4, 5))
    given = T.Bind(buf["sample_f32"][r, 0])
    drawn = _is_drawn(given)
    temperature = T.Bind(tirx.Select(drawn, tirx.max(given, v.f32(COLDEST)), v.f32(1.0)))
    bound = T.Bind(tirx.Select(drawn, v.f32(BOUND), v.f32(HIGHEST)))

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
        scaled = tirx.max(tirx.min(x / splat(temperature), splat(bound)), splat(-bound))
        finite = tirx.all(x < splat(v.f32(float("inf"))), x > splat(v.f32(NEG_INF)))
        return T.Bind(tirx.Select(finite, scaled, splat(v.f32(NEG_INF))))

    def whole(at: Expr) -> None:
        word = T.Bind(buf["allowed"][slot, at // 32])
        shift = T.Bind(v.splat(tirx.Cast("uint32", at % 32)) + v.cast(iota(), v.U32X16))
        bit = tirx.NE((v.splat(word) >> shift) & v.isplat(1, "uint32"), v.isplat(0, "uint32"))
        loads = (
            v.lanes(buf["logits"], [r, at]),
            v.lanes(buf["logit_bias"], [slot, at]),
            v.lanes(buf["counts"], [slot, at]),
        )
        v.put(buf["scratch:0"], [r, at], adjusted(*loads, bit, v.splat, lambda base: f"{base}x{v.LANES}"))

    def part(at: int) -> None:
        """Adjust the last vector, of which only some lanes are tokens."""
        for i in range(at, at + v.LANES):
            if i >= vocab:
                v.put1(buf["scratch:0"], [r, i], v.f32(NEG_INF))
                continue
            word = (buf["allowed"][slot, i // 32] >> tirx.IntImm("uint32", i % 32)) & tirx.IntImm("uint32", 1)
            loads = (buf["logits"][r, i], buf["logit_bias"][slot, i], buf["counts"][slot, i])
            one = tirx.NE(word, tirx.IntImm("uint32", 0))
            v.put1(buf["scratch:0"], [r, i], adjusted(*loads, one, lambda x: x, lambda base: base))

    best = Best(c * chunk(vocab))
    full = vocab // v.LANES * v.LANES
    with T.serial(0, chunk(vocab) // v.LANES) as i:
        at = T.Bind(c * chunk(vocab) + i * v.LANES)
        with T.If(at < full):
            with T.Then():
                whole(at)
            with T.Else():
                v.put(buf["scratch:0"], [r, at], v.splat(NEG_INF))
                if vocab % v.LANES:
                    with T.If(tirx.EQ(at, full)), T.Then():
                        part(full)
        best.offer(v.lanes(buf["scratch:0"], [r, at]), at)
    best.store(buf, r, c)


def _draw(buf: dict[str, Expr], r: Expr, c: Expr, vocab: int) -> None:
    """Step 9 for a chunk: its largest l + noise among the tokens that are kept."""
    least = T.Bind(buf["scratch:5"][r])
    top = T.Bind(buf["scratch:6"][r])
    bound = T.Bind(tirx.max(least, top - v.f32(NOISE)))
    best = Best(c * chunk(vocab))
    with T.serial(0, chunk(vocab) // v.LANES) as i:
        at = T.Bind(c * chunk(vocab) + i * v.LANES)
        x = v.lanes(buf["scratch:0"], [r, at])
        with T.If(v.hmax(x) >= bound), T.Then():
            noisy = T.Bind(x + gumbel(buf["sample_i32"], r, at))
            best.offer(T.Bind(tirx.Select(x >= v.splat(least), noisy, v.splat(NEG_INF))), at)
    best.store(buf, r, c)


def gumbel(params: Expr, r: Expr, start: Expr) -> Expr:
    """−log(−log(u)) for tokens start … start+15, with u from pcg4d(seed low, seed high, counter, token)."""

    def word(value: Expr) -> Expr:
        return T.Bind(
            v.splat(
                tirx.Cast("uint32", value) * tirx.IntImm("uint32", 1664525)
                + tirx.IntImm("uint32", 1013904223)
            )
        )

    x, y, z = word(params[r, 2]), word(params[r, 3]), word(params[r, 4])
    w = T.Bind(
        v.cast(v.splat(start) + iota(), v.U32X16) * v.isplat(1664525, "uint32")
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
