"""The kernels greedy and logprobs, and parts that sample shares: from logits to a token (rules:
docs/artifact.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.format.sampler import COLUMNS
from nearfar.format.sizes import MAX_ROWS, MAX_STEP
from nearfar.kernels.contract import SCRATCH, Stage, Staged
from nearfar.kernels.jobs import Greedy, Logprobs
from nearfar.kernels.jobs.logits import OverLogits
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.extents import opened_rows, whole
from nearfar.targets.cpu.units import Unit

Expr = Any
Args = list[tuple[str, tuple[int, ...], str]]
TOP = 20


CHUNKS = 16
"""Parts of a row of logits, which tasks share. The number is the same on every processor, because sums follow
the order of the parts.
"""
GROUP = 64
"""Tokens in a group, of which logprobs knows the largest; it reads all tokens of a group only if it must."""


def build(job: OverLogits, args: Args, body: Callable[[dict[str, Expr]], None]) -> Staged:
    """One launch of `job`. Arguments named scratch:<i> are memory between its loops, in order."""

    def named(*buffers: Expr) -> None:
        body(dict(zip([name for name, *_ in args], buffers, strict=True)))

    func = v.prim_func(job.kind, [(arg.replace(":", "_"), shape, dtype) for arg, shape, dtype in args], named)
    scratch = tuple((whole(shape, job.rows), dtype) for arg, shape, dtype in args if arg.startswith(SCRATCH))
    return Staged((Stage(func, tuple(arg for arg, *_ in args)),), scratch)


@contextmanager
def chunks(rows: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Loop over the rows and chunks in parallel; yields (row, chunk)."""
    with v.parallel(rows * CHUNKS) as task:
        yield T.Bind(task // CHUNKS), T.Bind(task % CHUNKS)


def chunk(vocab: int) -> int:
    """Columns in a chunk: a whole number of groups."""
    return -(-vocab // (CHUNKS * GROUP)) * GROUP


def iota() -> Expr:
    """A vector of 0, 1, 2, … 15."""
    return tirx.Ramp(v.i32(0), v.i32(1), v.LANES)


class Best:
    """A running argmax from token `start` on; each lane keeps the first of its largest values."""

    def __init__(self, start: Expr) -> None:
        self.value = v.registers(1)
        self.index = v.registers(1, v.I32X16)
        v.put1(self.value, [0], v.splat(float("-inf")))
        v.put1(self.index, [0], v.splat(start) + iota())

    def offer(self, value: Expr, start: Expr) -> None:
        """Compare with the values of sixteen tokens from `start` on; infinities and NaN never win."""
        wins = tirx.all(value > self.value[0], value < v.splat(float("inf")))
        v.put1(self.index, [0], tirx.Select(wins, v.splat(start) + iota(), self.index[0]))
        v.put1(self.value, [0], tirx.Select(wins, value, self.value[0]))

    def token(self) -> Expr:
        """The token with the largest value; -1 if none was finite."""
        best, index = self.result()
        return T.Bind(tirx.Select(best > v.f32(float("-inf")), index, v.i32(-1)))

    def result(self) -> tuple[Expr, Expr]:
        """The largest value and its index, the lowest on ties."""
        best = v.hmax(self.value[0])
        index = T.Bind(tirx.Select(tirx.EQ(self.value[0], v.splat(best)), self.index[0], v.isplat(2**31 - 1)))
        return best, v.hreduce(index, tirx.min, "int32")

    def store(self, buf: dict[str, Expr], r: Expr, c: Expr) -> None:
        """Write a chunk's result to scratch:1 (value) and scratch:2 (index)."""
        value, index = self.result()
        v.put1(buf["scratch:1"], [r, c], value)
        v.put1(buf["scratch:2"], [r, c], index)


def finish(buf: dict[str, Expr], r: Expr, token: Expr) -> None:
    """Write a row's token to `sampled`, and to the row of `tokens` that the next step reads."""
    v.put1(buf["sampled"], [r], token)
    feed = T.Bind(buf["sample_i32"][r, 5])
    with T.If(feed >= 0), T.Then():
        v.put1(buf["tokens"], [feed], tirx.max(token, v.i32(0)))


def _tail(buf: Expr, r: Expr, vocab: int) -> Expr:
    """The logits after the last whole vector, padded with -inf (a vector)."""
    tail = v.local((v.LANES,), "float32")
    for i in range(v.LANES):
        at = vocab - vocab % v.LANES + i
        v.put1(tail, [i], buf[r, at] if at < vocab else v.f32(float("-inf")))
    return v.lanes(tail, [0])


def greedy(job: Greedy, unit: Unit) -> Staged:
    """The launches of a Greedy job."""
    rows, vocab = opened_rows(job).rows, job.vocab
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sample_i32", (MAX_ROWS, COLUMNS), "int32"),
        ("sampled", (rows,), "int32"),  # this buffer's shape gives the number of rows
        ("tokens", (MAX_STEP,), "int32"),
    ]

    def body(buf: dict[str, Expr]) -> None:
        with v.parallel(rows) as r, T.If(buf["sample_i32"][r, 0] >= 0), T.Then():
            best = Best(v.i32(0))
            with T.serial(0, vocab // v.LANES) as i:
                best.offer(v.lanes(buf["logits"], [r, i * v.LANES]), i * v.LANES)
            if vocab % v.LANES:
                best.offer(_tail(buf["logits"], r, vocab), v.i32(vocab - vocab % v.LANES))
            finish(buf, r, best.token())

    return build(job, args, body)


def logprobs(job: Logprobs, unit: Unit) -> Staged:
    """The launches of a Logprobs job: the largest of the groups' maxima, 20 times.

    scratch: the logits; the groups' maxima; the chunks' sums of exponentials.
    """
    rows, vocab = opened_rows(job).rows, job.vocab
    width = chunk(vocab) * CHUNKS
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sampled", (MAX_ROWS,), "int32"),
        ("scratch:0", (rows, width), "float32"),
        ("scratch:1", (rows, width // GROUP), "float32"),
        ("scratch:2", (rows, CHUNKS), "float32"),
        ("logprob", (MAX_ROWS,), "float32"),
        ("top_ids", (MAX_ROWS, TOP), "int32"),
        ("top_logprobs", (MAX_ROWS, TOP), "float32"),
    ]

    def body(buf: dict[str, Expr]) -> None:
        work, groups = buf["scratch:0"], buf["scratch:1"]
        with chunks(rows) as (r, c), T.serial(0, chunk(vocab) // GROUP) as g:
            at = T.Bind(c * chunk(vocab) + g * GROUP)
            with T.serial(0, GROUP // v.LANES) as i:
                _copy(buf["logits"], work, r, T.Bind(at + i * v.LANES), vocab)
            v.put1(groups, [r, at // GROUP], _largest(work, r, at, GROUP)[0])
        with chunks(rows) as (r, c):
            top, total = _largest(groups, r, v.i32(0), width // GROUP)[0], v.registers(1)
            v.put1(total, [0], v.splat(0.0))
            with T.serial(0, chunk(vocab) // v.LANES) as i:
                value = v.lanes(work, [r, c * chunk(vocab) + i * v.LANES])
                v.put1(total, [0], total[0] + v.exp(value - v.splat(top)))
            v.put1(buf["scratch:2"], [r, c], v.hsum(total[0]))
        with v.parallel(rows) as r:
            _tell(buf, r, vocab, width)

    return build(job, args, body)


def _tell(buf: dict[str, Expr], r: Expr, vocab: int, width: int) -> None:
    """Write a row's log probabilities. Each token that has been written is set to -inf in the
    scratch copy.
    """
    work, groups = buf["scratch:0"], buf["scratch:1"]
    total = v.scalar("float32")
    v.put1(total, [0], v.f32(0.0))
    with T.serial(0, CHUNKS) as c:
        v.put1(total, [0], total[0] + buf["scratch:2"][r, c])
    top = _largest(groups, r, v.i32(0), width // GROUP)[0]
    log_sum = T.Bind(tirx.log(total[0]) + top)
    sampled = T.Bind(tirx.max(tirx.min(buf["sampled"][r], vocab - 1), 0))
    v.put1(buf["logprob"], [r], buf["logits"][r, sampled] - log_sum)
    with T.serial(0, TOP) as j:
        group = _largest(groups, r, v.i32(0), width // GROUP)[1]
        value, index = _largest(work, r, T.Bind(group * GROUP), GROUP)
        v.put1(buf["top_ids"], [r, j], tirx.min(index, vocab - 1))
        v.put1(buf["top_logprobs"], [r, j], value - log_sum)
        v.put1(work, [r, index], v.f32(float("-inf")))
        v.put1(groups, [r, group], _largest(work, r, T.Bind(group * GROUP), GROUP)[0])


def _largest(buf: Expr, r: Expr, first: Expr, count: int) -> tuple[Expr, Expr]:
    """The largest finite value among `count` values of a row, and its index."""
    best = Best(first)
    with T.serial(0, count // v.LANES) as i:
        at = T.Bind(first + i * v.LANES)
        best.offer(v.lanes(buf, [r, at]), at)
    if count % v.LANES:
        raise AssertionError(f"{count} values do not fill whole vectors")
    return best.result()


def _copy(logits: Expr, work: Expr, r: Expr, at: Expr, vocab: int) -> None:
    """Copy a vector of a row into scratch; past the vocabulary it is -inf."""
    full = vocab // v.LANES * v.LANES
    with T.If(at < full):
        with T.Then():
            v.put(work, [r, at], v.lanes(logits, [r, at]))
        with T.Else():
            v.put(work, [r, at], v.splat(float("-inf")))
            if vocab % v.LANES:
                with T.If(tirx.EQ(at, full)), T.Then():
                    v.put(work, [r, at], _tail(logits, r, vocab))
