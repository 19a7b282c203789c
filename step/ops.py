"""The step as data: what one step of a model computes, as a list of frozen records that every target reads.

A step takes M token rows, each with a token id, a position and a sequence, and gives logits, or embeddings,
for the rows asked for. Values are named by strings; every operation makes one (`out`), float32 or the
target's activation dtype, of shape [M, width]. Weights are named after parameters (params.py). The records
know no target: the Relax lowering (build/program/lowering.py), the MLX interpreter
(edge_runtime/executors/mlx), the NumPy reference of the tests, `inspect` and `synth` read the one list, and
it stands in the manifest.

What does not need an operation is folded at build: partial and interleaved rotation into the order of rows
(params.RotaryOrder), yarn and the like into the table of frequencies (rope.py), 1 + w norms and logit scales
into the weight (Param.offset, Param.scale), a residual multiplier into the embedding and the epsilons
(models/granite.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu2"]
"""silu: x·σ(x). gelu_tanh, gelu_erf: the GELU (Hendrycks & Gimpel, 2016) by tanh, or exactly. relu2:
max(x, 0)².
"""


@dataclass(frozen=True)
class Embed:
    """out = scale · the rows of `table` [vocab, width] that the token ids name."""

    op: ClassVar = "embed"
    out: str
    table: str
    scale: float = 1.0


@dataclass(frozen=True)
class Norm:
    """RMS norm: out = x / sqrt(mean(x²) + eps) · weight, in float32 (Zhang & Sennrich, 2019).

    `groups`: so many equal stretches of a row, each normalized by itself, with one weight [width/groups] for
    all.
    """

    op: ClassVar = "norm"
    out: str
    x: str
    weight: str
    eps: float
    groups: int = 1


@dataclass(frozen=True)
class Linear:
    """out = x·Wᵀ (+ bias)."""

    op: ClassVar = "linear"
    out: str
    x: str
    weight: str
    bias: str | None = None


@dataclass(frozen=True)
class RopeAppend:
    """Norms and rotation of q and k; k and v go to cache `cache`, out = q [M, heads·head_dim].

    x has columns [q | k | v], or q alone where `append` is false: the layer reads what another has appended.
    In order, each where it is there:
    1. `q_norm`, `k_norm`: RMS norm with `eps`, of each head (weights [head_dim]), or with `norm_all` of the
       whole q and k (weights [heads·head_dim], [kv_heads·head_dim]); with `norm_after` it follows the
       rotation.
    2. `rope`: the table by which pairs (i, i + head_dim/2) turn by position · inv_freq[i]; None: no rotation.
    3. `q_scale` (beta, original): q·(1 + beta·ln(1 + ⌊position/original⌋)).
    4. `v_norm`: RMS norm of each head of v with this epsilon, without weights.
    """

    op: ClassVar = "rope_append"
    out: str
    x: str
    cache: int
    heads: int
    rope: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    eps: float = 0.0
    norm_all: bool = False
    norm_after: bool = False
    q_scale: tuple[float, float] | None = None
    v_norm: float | None = None
    append: bool = True


@dataclass(frozen=True)
class Attend:
    """Causal grouped-query attention over cache `cache`; out [M, heads·head_dim].

    Scores are scale·q·k, softcap·tanh(score/softcap) where there is a softcap (Gemma 2). `window`: only so
    many positions, the row's own included. `sinks`: weights [heads], one more logit a head, which has no
    value (gpt-oss).
    """

    op: ClassVar = "attend"
    out: str
    x: str
    cache: int
    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None


@dataclass(frozen=True)
class Glu:
    """out = activation(gate) · up, of x = [gate | up] (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    op: ClassVar = "glu"
    out: str
    x: str
    activation: Activation


@dataclass(frozen=True)
class Act:
    """out = activation(x)."""

    op: ClassVar = "act"
    out: str
    x: str
    activation: Activation


@dataclass(frozen=True)
class Add:
    """out = (a + b) · scale."""

    op: ClassVar = "add"
    out: str
    a: str
    b: str
    scale: float = 1.0


@dataclass(frozen=True)
class Mul:
    """out = a · b, element by element."""

    op: ClassVar = "mul"
    out: str
    a: str
    b: str


@dataclass(frozen=True)
class Scale:
    """out = x · weight, a number that the checkpoint holds: weight is float32 [1]."""

    op: ClassVar = "scale"
    out: str
    x: str
    weight: str


@dataclass(frozen=True)
class Columns:
    """out = columns [start, start + count) of x."""

    op: ClassVar = "columns"
    out: str
    x: str
    start: int
    count: int


@dataclass(frozen=True)
class Logits:
    """The end: x·Wᵀ of the rows that `logit_rows` names, float32 [16, vocab]; softcap·tanh(y/softcap)
    where there is one.
    """

    op: ClassVar = "logits"
    out: str
    x: str
    weight: str
    bias: str | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Embedding:
    """The end of a model that gives embeddings: the rows of x that `logit_rows` names, float32 [16, width].

    They are as the model makes them: whoever reads them normalizes them, after what is cut off (OpenAI's
    `dimensions`).
    """

    op: ClassVar = "embedding"
    out: str
    x: str
    width: int


Op = (
    Embed | Norm | Linear | RopeAppend | Attend | Glu | Act | Add | Mul | Scale | Columns | Logits | Embedding
)
OPS: dict[str, type[Op]] = {
    kind.op: kind
    for kind in (
        Embed, Norm, Linear, RopeAppend, Attend, Glu, Act, Add, Mul, Scale, Columns, Logits, Embedding
    )
}  # fmt: skip
"""By the name under which they stand in a manifest."""


def reads(op: Op) -> tuple[str, ...]:
    """The values that an operation reads."""
    return (op.a, op.b) if isinstance(op, Add | Mul) else () if isinstance(op, Embed) else (op.x,)


def weights_of(op: Op) -> tuple[str, ...]:
    """The parameters that an operation reads."""
    match op:
        case Embed():
            found: tuple[str | None, ...] = (op.table,)
        case Norm() | Scale():
            found = (op.weight,)
        case Linear() | Logits():
            found = (op.weight, op.bias)
        case RopeAppend():
            found = (op.q_norm, op.k_norm)
        case Attend():
            found = (op.sinks,)
        case _:
            found = ()
    return tuple(name for name in found if name is not None)
