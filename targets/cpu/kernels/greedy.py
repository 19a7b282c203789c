"""From logits to a token: greedy, sample, logprobs (the rules are in docs/artifact.md)."""

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
"""Pieces that a row of logits is cut into, for tasks to share out: as many whatever the processor, for sums
go over them in order.
"""
GROUP = 64
"""Tokens of which logprobs knows the largest: it looks at all tokens of a group only where that matters."""


def build(job: OverLogits, args: Args, body: Callable[[dict[str, Expr]], None]) -> Staged:
    """One launch of `job`. `args` called scratch:<i> are memory between its loops, first to last."""

    def named(*buffers: Expr) -> None:
        body(dict(zip([name for name, *_ in args], buffers, strict=True)))

    func = v.prim_func(job.kind, [(arg.replace(":", "_"), shape, dtype) for arg, shape, dtype in args], named)
    scratch = tuple((whole(shape, job.rows), dtype) for arg, shape, dtype in args if arg.startswith(SCRATCH))
    return Staged((Stage(func, tuple(arg for arg, *_ in args)),), scratch)


@contextmanager
def chunks(rows: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Tasks of each row and chunk."""
    with v.parallel(rows * CHUNKS) as task:
        yield T.Bind(task // CHUNKS), T.Bind(task % CHUNKS)


def chunk(vocab: int) -> int:
    """Columns of a chunk: whole groups."""
    return -(-vocab // (CHUNKS * GROUP)) * GROUP


def iota() -> Expr:
    """0, 1, 2, … 15."""
    return tirx.Ramp(v.i32(0), v.i32(1), v.LANES)


class Best:
    """Running argmax from token `start` on: candidates side by side, each the first largest of its lane."""

    def __init__(self, start: Expr) -> None:
        self.value = v.registers(1)
        self.index = v.registers(1, v.I32X16)
        v.put1(self.value, [0], v.splat(float("-inf")))
        v.put1(self.index, [0], v.splat(start) + iota())

    def offer(self, value: Expr, start: Expr) -> None:
        """Values of tokens from `start` on; infinities and NaN never win."""
        wins = tirx.all(value > self.value[0], value < v.splat(float("inf")))
        v.put1(self.index, [0], tirx.Select(wins, v.splat(start) + iota(), self.index[0]))
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

    def store(self, buf: dict[str, Expr], r: Expr, c: Expr) -> None:
        """The result of a chunk, to scratch:1 and scratch:2."""
        value, index = self.result()
        v.put1(buf["scratch:1"], [r, c], value)
        v.put1(buf["scratch:2"], [r, c], index)


def finish(buf: dict[str, Expr], r: Expr, token: Expr) -> None:
    """Write a row's token: to `sampled`, and where the next step reads it."""
    v.put1(buf["sampled"], [r], token)
    feed = T.Bind(buf["sample_i32"][r, 5])
    with T.If(feed >= 0), T.Then():
        v.put1(buf["tokens"], [feed], tirx.max(token, v.i32(0)))


def _tail(buf: Expr, r: Expr, vocab: int) -> Expr:
    """The logits that whole vectors leave, filled up with -inf (a vector)."""
    tail = v.local((v.LANES,), "float32")
    for i in range(v.LANES):
        at = vocab - vocab % v.LANES + i
        v.put1(tail, [i], buf[r, at] if at < vocab else v.f32(float("-inf")))
    return v.lanes(tail, [0])


def greedy(job: Greedy, unit: Unit) -> Staged:
    """See Greedy."""
    rows, vocab = opened_rows(job).rows, job.vocab
    args: Args = [
        ("logits", (MAX_ROWS, vocab), "float32"),
        ("sample_i32", (MAX_ROWS, COLUMNS), "int32"),
        ("sampled", (rows,), "int32"),  # which says how many rows there are
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
    """See Logprobs: of the groups' largest the largest, 20 times.

    scratch: the logits; the groups' largest; the chunks' sums of exponentials.
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
    """A row's log probabilities. What was told is -inf from then on."""
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
    """The largest finite of `count` values of a row, and where it is."""
    best = Best(first)
    with T.serial(0, count // v.LANES) as i:
        at = T.Bind(first + i * v.LANES)
        best.offer(v.lanes(buf, [r, at]), at)
    if count % v.LANES:
        raise AssertionError(f"{count} values are no whole vectors")
    return best.result()


def _copy(logits: Expr, work: Expr, r: Expr, at: Expr, vocab: int) -> None:
    """A vector of a row into scratch, whose end is filled with -inf."""
    full = vocab // v.LANES * v.LANES
    with T.If(at < full):
        with T.Then():
            v.put(work, [r, at], v.lanes(logits, [r, at]))
        with T.Else():
            v.put(work, [r, at], v.splat(float("-inf")))
            if vocab % v.LANES:
                with T.If(tirx.EQ(at, full)), T.Then():
                    v.put(work, [r, at], _tail(logits, r, vocab))
