"""From logits to a token: greedy, sample, logprobs (the rules are in docs/artifact.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sampler import COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.units import Unit
from nearfar.targets.jobs import Greedy, Logprobs
from nearfar.targets.kernels import Stage, Staged

Expr = Any
Args = list[tuple[str, tuple[int, ...], str]]
NONE = -1e30  # below every logit that matters; stands for -inf where arithmetic follows
TOP = 20


def _build(
    name: str, args: Args, rows: int, row_body: Callable[[dict[str, Expr], Expr], None], scratch: int = 0
) -> Staged:
    """One launch with a task for each row; `scratch` args hold floats between the passes over a row."""

    def body(*buffers: Expr) -> None:
        buf = dict(zip([name for name, *_ in args], buffers, strict=True))
        with T.parallel(0, rows) as r:
            row_body(buf, r)

    func = v.prim_func(name, [(arg.replace(":", "_"), shape, dtype) for arg, shape, dtype in args], body)
    shapes = {arg: (shape, dtype) for arg, shape, dtype in args}
    return Staged(
        (Stage(func, tuple(arg for arg, *_ in args)),), tuple(shapes[f"scratch:{i}"] for i in range(scratch))
    )


def _iota() -> Expr:
    return tirx.Ramp(v.i32(0), v.i32(1), v.LANES)


class Best:
    """Running argmax: sixteen candidates side by side, each the first largest of its lane."""

    def __init__(self) -> None:
        self.value = v.registers(1)
        self.index = v.registers(1, v.I32X16)
        v.put1(self.value, [0], v.splat(float("-inf")))
        v.put1(self.index, [0], _iota())

    def offer(self, value: Expr, start: Expr) -> None:
        """Sixteen values of tokens start … start+15; infinities and NaN never win."""
        wins = tirx.all(value > self.value[0], value < v.splat(float("inf")))
        v.put1(self.index, [0], tirx.Select(wins, v.splat(start) + _iota(), self.index[0]))
        v.put1(self.value, [0], tirx.Select(wins, value, self.value[0]))

    def token(self) -> Expr:
        """The token of the largest value; -1 where none was finite."""
        best, index = self.result()
        return T.Bind(tirx.Select(best > v.f32(float("-inf")), index, v.i32(-1)))

    def result(self) -> tuple[Expr, Expr]:
        """(value, index): the largest, the lowest index on ties."""
        best = v.hmax(self.value[0])
        index = T.Bind(tirx.Select(tirx.EQ(self.value[0], v.splat(best)), self.index[0], v.isplat(2**31 - 1)))
        return best, v.hreduce(index, tirx.min, "int32")


def _finish(buf: dict[str, Expr], r: Expr, token: Expr) -> None:
    v.put1(buf["sampled"], [r], token)
    feed = T.Bind(buf["sample_i32"][r, 5])
    with T.If(feed >= 0), T.Then():
        v.put1(buf["tokens"], [feed], tirx.max(token, v.i32(0)))


def _padded(vocab: int) -> int:
    return -(-vocab // v.LANES) * v.LANES


def _copy_tail(buf: Expr, r: Expr, vocab: int) -> Expr:
    """The last vocab % 16 logits, filled up with -inf (a vector)."""
    tail = v.local((v.LANES,), "float32")
    for i in range(v.LANES):
        at = vocab - vocab % v.LANES + i
        v.put1(tail, [i], buf[r, at] if at < vocab else v.f32(float("-inf")))
    return v.lanes(tail, [0])


def greedy(job: Greedy, unit: Unit) -> Staged:
    """See Greedy."""
    rows, vocab = job.rows, job.vocab
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sample_i32", (MAX_ROWS, COLUMNS), "int32"),
        ("sampled", (MAX_ROWS,), "int32"),
        ("tokens", (MAX_STEP,), "int32"),
    ]

    def row(buf: dict[str, Expr], r: Expr) -> None:
        with T.If(buf["sample_i32"][r, 0] >= 0), T.Then():
            best = Best()
            with T.serial(0, vocab // v.LANES) as i:
                best.offer(v.lanes(buf["logits"], [r, i * v.LANES]), i * v.LANES)
            if vocab % v.LANES:
                best.offer(_copy_tail(buf["logits"], r, vocab), v.i32(vocab - vocab % v.LANES))
            _finish(buf, r, best.token())

    return _build("greedy", args, rows, row)


def logprobs(job: Logprobs, unit: Unit) -> Staged:
    """See Logprobs: 20 passes, each finding what follows the last (value descending, index ascending)."""
    rows, vocab = job.rows, job.vocab
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sampled", (MAX_ROWS,), "int32"),
        ("scratch:0", (MAX_ROWS, _padded(vocab)), "float32"),
        ("logprob", (MAX_ROWS,), "float32"),
        ("top_ids", (MAX_ROWS, TOP), "int32"),
        ("top_logprobs", (MAX_ROWS, TOP), "float32"),
    ]

    def row(buf: dict[str, Expr], r: Expr) -> None:
        work = buf["scratch:0"]
        _fill(buf["logits"], work, r, vocab)
        last, last_index = v.scalar("float32"), v.scalar("int32")
        largest, total = v.scalar("float32"), v.registers(1)
        v.put1(last, [0], v.f32(float("inf")))
        v.put1(last_index, [0], v.i32(-1))
        first = Best()
        with T.serial(0, _padded(vocab) // v.LANES) as i:
            first.offer(v.lanes(work, [r, i * v.LANES]), i * v.LANES)
        v.put1(largest, [0], first.result()[0])
        v.put1(total, [0], v.splat(0.0))
        with T.serial(0, _padded(vocab) // v.LANES) as i:
            v.put1(total, [0], total[0] + v.exp(v.lanes(work, [r, i * v.LANES]) - v.splat(largest[0])))
        log_sum = T.Bind(tirx.log(v.hsum(total[0])) + largest[0])
        v.put1(
            buf["logprob"],
            [r],
            buf["logits"][r, tirx.max(tirx.min(buf["sampled"][r], vocab - 1), 0)] - log_sum,
        )
        with T.serial(0, TOP) as j:
            best = Best()
            with T.serial(0, _padded(vocab) // v.LANES) as i:
                value = v.lanes(work, [r, i * v.LANES])
                index = T.Bind(v.splat(i * v.LANES) + _iota())
                tied = tirx.all(tirx.EQ(value, v.splat(last[0])), index > v.splat(last_index[0]))
                after = tirx.any(value < v.splat(last[0]), tied)
                best.offer(T.Bind(tirx.Select(after, value, v.splat(float("-inf")))), i * v.LANES)
            value, index = best.result()
            v.put1(last, [0], value)
            v.put1(last_index, [0], index)
            v.put1(buf["top_ids"], [r, j], index)
            v.put1(buf["top_logprobs"], [r, j], value - log_sum)

    return _build("logprobs", args, rows, row, scratch=1)


def _fill(logits: Expr, work: Expr, r: Expr, vocab: int) -> None:
    """Copy a row into scratch, whose width is a multiple of 16, the end filled with -inf."""
    with T.serial(0, vocab // v.LANES) as i:
        v.put(work, [r, i * v.LANES], v.lanes(logits, [r, i * v.LANES]))
    if vocab % v.LANES:
        v.put(work, [r, v.i32(vocab - vocab % v.LANES)], _copy_tail(logits, r, vocab))
