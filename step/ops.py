"""The step as data: what one step of a model computes, as a list of frozen records that every target reads.

A step takes M token rows, each with a token id, a position and a sequence, and gives logits, or embeddings,
for the requested rows. Values are named by strings; every operation makes one (`out`), float32 or the
target's activation dtype, of shape [M, width]. Weights are named after parameters (params.py). The records
know no target. Each reader of the list has one table from record to function: the Relax lowering
(build/program/operations.py), NumPy (build/calibration/operations.py), MLX
(edge_runtime/executors/mlx/operations.py) and ONNX (targets/onnx/operations.py). The manifest contains
the list. docs/adding-an-operation.md shows what one more operation takes.

operation.py says what a record is. state_ops.py has the records that keep a state; they are in OPS, too.

Some features need no operation, because a build folds them: partial and interleaved rotation into the order
of rows (params.RotaryOrder), yarn and other stretching into the table of frequencies (rope.py), 1 + w norms
and logit scales into the weight (Param.offset, Param.scale), a residual multiplier into the embedding and the
epsilons (models/granite.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nearfar.step.operation import (
    Activation,
    Cache,
    Input,
    Lookup,
    Matrix,
    Op,
    Rotation,
    Score,
    Stack,
    Vector,
)
from nearfar.step.shapes import Shapes
from nearfar.step.state_ops import Conv as Conv
from nearfar.step.state_ops import Delta as Delta
from nearfar.step.state_ops import Ssm as Ssm


@dataclass(frozen=True)
class Embed(Op):
    """out = scale · the rows of `table` [vocab, width] that the token ids name."""

    op: ClassVar = "embed"
    table: Lookup
    scale: float = 1.0

    def out_width(self, of: Shapes) -> int:
        """The table's inputs."""
        return of.params[self.table].k


@dataclass(frozen=True)
class Norm(Op):
    """RMS norm: out = x / sqrt(mean(x²) + eps) · weight, in float32 (Zhang & Sennrich, 2019).

    `groups`: the number of equal parts of a row that are normalized separately. The weight is [width/groups],
    the same for all of them, or with `each` [width].
    """

    op: ClassVar = "norm"
    x: Input
    weight: Vector
    eps: float
    groups: int = 1
    each: bool = False

    def out_width(self, of: Shapes) -> int:
        """The width of x."""
        return of.widths[self.x]

    def problems(self, of: Shapes) -> Iterator[str]:
        """The weight must have a value for each column of a group, or of the row."""
        width = of.widths[self.x]
        if self.groups < 1 or width % self.groups:
            yield f"normalizes {self.groups} groups of {self.x}, which has {width} columns"
        yield from of.long(self.weight, 1 if self.each else self.groups, width)


@dataclass(frozen=True)
class Linear(Op):
    """out = x·Wᵀ (+ bias)."""

    op: ClassVar = "linear"
    x: Input
    weight: Matrix
    bias: Vector | None = None

    def out_width(self, of: Shapes) -> int:
        """The matrix's rows."""
        return of.params[self.weight].n

    def problems(self, of: Shapes) -> Iterator[str]:
        """The matrix must have as many inputs as x has columns; a bias must have a value for each row of the
        matrix.
        """
        yield from of.product(self.x, self.weight, self.bias)


@dataclass(frozen=True)
class RopeAppend(Op):
    """Norms and rotation of q and k; k and v go to cache `cache`, out = q [M, heads·head_dim].

    x has columns [q | k | v], or q alone if `append` is false: the layer then reads another layer's cache.
    The steps, in order, each if its field is set:
    1. `q_norm`, `k_norm`: RMS norm with `eps`, of each head (weights [head_dim]), or with `norm_all` of the
       whole q and k (weights [heads·head_dim], [kv_heads·head_dim]); with `norm_after` it follows the
       rotation.
    2. `rope`: the table by which pairs (i, i + head_dim/2) turn by position · inv_freq[i]; None: no rotation.
    3. `q_scale` (beta, original): q·(1 + beta·ln(1 + ⌊position/original⌋)).
    4. `v_norm`: RMS norm of each head of v with this epsilon, without weights.
    """

    op: ClassVar = "rope_append"
    half: ClassVar = True
    x: Input
    cache: Cache
    heads: int
    rope: Rotation | None = None
    q_norm: Vector | None = None
    k_norm: Vector | None = None
    eps: float = 0.0
    norm_all: bool = False
    norm_after: bool = False
    q_scale: tuple[float, float] | None = None
    v_norm: float | None = None
    append: bool = True

    def out_width(self, of: Shapes) -> int:
        """heads·head_dim."""
        return self.heads * of.caches[self.cache].head_dim

    def problems(self, of: Shapes) -> Iterator[str]:
        """Heads, the norms' weights and the columns of x must fit the cache."""
        cache = of.caches[self.cache]
        yield from of.kept(self.cache, "kv")
        yield from of.grouped(self.heads, self.cache)
        heads = self.heads + 2 * cache.kv_heads * self.append
        yield from of.wide(self.x, heads * cache.head_dim)
        for norm, count in ((self.q_norm, self.heads), (self.k_norm, cache.kv_heads)):
            if norm is not None:
                yield from of.long(norm, 1, cache.head_dim * (count if self.norm_all else 1))


@dataclass(frozen=True)
class Attend(Op):
    """Causal grouped-query attention over cache `cache`; out [M, heads·head_dim].

    Scores are scale·q·k, or softcap·tanh(score/softcap) if there is a softcap (Gemma 2). `window`: the number
    of positions attended to, the row's own included. `sinks`: weights [heads], one more logit for each head,
    without a value (gpt-oss).
    """

    op: ClassVar = "attend"
    half: ClassVar = True
    x: Input
    cache: Cache
    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Vector | None = None

    def out_width(self, of: Shapes) -> int:
        """The width of x."""
        return of.widths[self.x]

    def problems(self, of: Shapes) -> Iterator[str]:
        """Queries must be as wide as the heads; each head must have one sink."""
        yield from of.kept(self.cache, "kv")
        yield from of.grouped(self.heads, self.cache)
        yield from of.wide(self.x, self.heads * of.caches[self.cache].head_dim)
        if self.sinks is not None:
            yield from of.long(self.sinks, 1, self.heads)


@dataclass(frozen=True)
class Glu(Op):
    """out = activation(gate) · up, of x = [gate | up] (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    op: ClassVar = "glu"
    half: ClassVar = True
    x: Input
    activation: Activation

    def out_width(self, of: Shapes) -> int:
        """Half of the width of x."""
        return of.widths[self.x] // 2

    def problems(self, of: Shapes) -> Iterator[str]:
        """The number of columns of x must be even."""
        if of.widths[self.x] % 2:
            yield f"halves {self.x}, which has {of.widths[self.x]} columns"


@dataclass(frozen=True)
class Act(Op):
    """out = activation(x)."""

    op: ClassVar = "act"
    x: Input
    activation: Activation

    def out_width(self, of: Shapes) -> int:
        """The width of x."""
        return of.widths[self.x]


@dataclass(frozen=True)
class Add(Op):
    """out = (a + b) · scale."""

    op: ClassVar = "add"
    a: Input
    b: Input
    scale: float = 1.0

    def out_width(self, of: Shapes) -> int:
        """The width of a and b."""
        return of.widths[self.a]

    def problems(self, of: Shapes) -> Iterator[str]:
        """Both values must have the same width."""
        yield from of.wide(self.b, of.widths[self.a])


@dataclass(frozen=True)
class Mul(Op):
    """out = a · b, element by element; a `b` of one column multiplies every column of a."""

    op: ClassVar = "mul"
    a: Input
    b: Input

    def out_width(self, of: Shapes) -> int:
        """As many columns as a has, also where b has one."""
        return of.widths[self.a]

    def problems(self, of: Shapes) -> Iterator[str]:
        """Both values must have the same width, if b has more than one column."""
        if of.widths[self.b] != 1:
            yield from of.wide(self.b, of.widths[self.a])


@dataclass(frozen=True)
class Scale(Op):
    """out = x · factor · weight. The weight, if there is one, is a number that the checkpoint holds: float32
    [1].
    """

    op: ClassVar = "scale"
    x: Input
    weight: Vector | None = None
    factor: float = 1.0

    def out_width(self, of: Shapes) -> int:
        """The width of x."""
        return of.widths[self.x]

    def problems(self, of: Shapes) -> Iterator[str]:
        """The weight must be one number."""
        if self.weight is not None:
            yield from of.long(self.weight, 1, 1)


@dataclass(frozen=True)
class Columns(Op):
    """out = columns [start, start + count) of x."""

    op: ClassVar = "columns"
    x: Input
    start: int
    count: int

    def out_width(self, of: Shapes) -> int:
        """`count`."""
        return self.count

    def problems(self, of: Shapes) -> Iterator[str]:
        """The columns must exist in x."""
        if self.start + self.count > of.widths[self.x]:
            yield (
                f"takes columns {self.start} to {self.start + self.count} of {self.x}, which has "
                f"{of.widths[self.x]}"
            )


@dataclass(frozen=True)
class Route(Op):
    """The experts of each row: out [M, 2·top] has the numbers of `top` experts, then their weights, float32.

    x [M, experts] are the router's logits. Weights are `score` of them. The experts with the highest weights
    are chosen, the best first, of equal ones the lower number; `bias` [experts] is added for the choice
    alone. With `normalize` (an epsilon, which may be 0) the chosen weights are divided by their sum +
    epsilon; `scale`, and each expert's own factor in `factors` [experts], multiply the result.
    """

    op: ClassVar = "route"
    x: Input
    top: int
    score: Score = "softmax"
    normalize: float | None = None
    bias: Vector | None = None
    scale: float = 1.0
    factors: Vector | None = None

    def out_width(self, of: Shapes) -> int:
        """2·top."""
        return 2 * self.top

    def problems(self, of: Shapes) -> Iterator[str]:
        """There must be as many experts as are chosen, and a bias and a factor for each expert."""
        if not 0 < self.top <= of.widths[self.x]:
            yield f"chooses {self.top} of {of.widths[self.x]} experts"
        for vector in (self.bias, self.factors):
            if vector is not None:
                yield from of.long(vector, 1, of.widths[self.x])


@dataclass(frozen=True)
class Experts(Op):
    """out = Σ over the row's experts e of weight_e · (down_e·h_e + down_bias_e), with h_e = activation(gate)
    · up of [gate | up] = gate_up_e·x + gate_up_bias_e (Shazeer et al., 2017).

    `route`: the result of Route. `gate_up` stacks matrices [2·inner, k], `down` matrices [n, inner]; their
    biases are stacked alike. `clamp` (alpha, limit): h = (clip(up, ±limit) + 1) · g·σ(alpha·g) with g =
    min(gate, limit), instead of `activation` (gpt-oss). Without `gated`, `gate_up` stacks matrices
    [inner, k], and h = activation(gate_up_e·x + gate_up_bias_e).
    """

    op: ClassVar = "experts"
    x: Input
    route: Input
    gate_up: Stack
    down: Stack
    activation: Activation
    gate_up_bias: Vector | None = None
    down_bias: Vector | None = None
    clamp: tuple[float, float] | None = None
    gated: bool = True

    def out_width(self, of: Shapes) -> int:
        """The rows of an expert's last matrix."""
        down = of.params[self.down]
        return down.n // down.stack

    def problems(self, of: Shapes) -> Iterator[str]:
        """Both stacks must be as high, and fit x and each other; there must be a bias for each row."""
        first, last = of.params[self.gate_up], of.params[self.down]
        yield from of.product(self.x, self.gate_up, self.gate_up_bias)
        if self.down_bias is not None:
            yield from of.long(self.down_bias, 1, last.n)
        if first.stack != last.stack:
            yield f"has {first.stack} experts in {self.gate_up} and {last.stack} in {self.down}"
        elif (rows := first.n // first.stack) != (1 + self.gated) * last.k:
            yield f"has {rows} rows for each expert in {self.gate_up}, and {last.k} inputs in {self.down}"
        if self.clamp is not None and not self.gated:
            yield "clamps a gate that it does not have"
        if of.widths[self.route] % 2:
            yield f"reads {self.route} of {of.widths[self.route]} columns: numbers, and as many weights"


@dataclass(frozen=True)
class Logits(Op):
    """The head: x·Wᵀ for the rows that `logit_rows` names, float32 [16, vocab]; softcap·tanh(y/softcap) if
    there is a softcap.
    """

    op: ClassVar = "logits"
    ends: ClassVar = True
    x: Input
    weight: Matrix
    bias: Vector | None = None
    softcap: float | None = None

    def out_width(self, of: Shapes) -> int:
        """The size of the vocabulary."""
        return of.params[self.weight].n

    def problems(self, of: Shapes) -> Iterator[str]:
        """The matrix must have as many inputs as x has columns; a bias must have a value for each row of the
        matrix.
        """
        yield from of.product(self.x, self.weight, self.bias)


@dataclass(frozen=True)
class Embedding(Op):
    """The end of a model that gives embeddings: the rows of x that `logit_rows` names, float32 [16, width].

    They are not normalized: the reader normalizes them after it has cut them (OpenAI's `dimensions`).
    """

    op: ClassVar = "embedding"
    ends: ClassVar = True
    x: Input
    width: int

    def out_width(self, of: Shapes) -> int:
        """`width`."""
        return self.width

    def problems(self, of: Shapes) -> Iterator[str]:
        """`width` must be the width of x."""
        yield from of.wide(self.x, self.width)


OPS: dict[str, type[Op]] = {kind.op: kind for kind in Op.__subclasses__()}
"""Every operation's record, by the operation's name in a manifest."""
