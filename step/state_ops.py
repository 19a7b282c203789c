"""Operations that read what earlier rows of a sequence left in a state: convolutions over positions, and
recurrences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nearfar.step.operation import Activation, Cache, Input, Op, Vector
from nearfar.step.shapes import Shapes


@dataclass(frozen=True)
class Conv(Op):
    """Causal convolution of each column by itself, over positions: of the row at position p,
    out = activation(Σ_t weight[column·taps + t] · x(p − taps + 1 + t) + bias).

    x of the rows goes to cache `cache`, which keeps one tensor (parts "k", [1, width] a position) for the
    last `taps` positions. Before position 0 x is 0. `activation`: None leaves the sum as it is. The short
    convolutions of LFM2, and those before a recurrence (Qwen 3.5), are this operation.
    """

    op: ClassVar = "conv"
    x: Input
    cache: Cache
    weight: Vector
    taps: int
    activation: Activation | None = None
    bias: Vector | None = None

    def out_width(self, of: Shapes) -> int:
        """The width of x."""
        return of.widths[self.x]

    def problems(self, of: Shapes) -> Iterator[str]:
        """The cache must keep the columns of x; each column must have `taps` weights, and one bias."""
        yield from of.kept(self.cache, "k")
        width = of.widths[self.x]
        yield from of.wide(self.x, of.caches[self.cache].kv_heads * of.caches[self.cache].head_dim)
        if self.taps < 1 or of.params[self.weight].n != width * self.taps:
            yield f"reads {self.weight} of {of.params[self.weight].n} values, and needs {width} · {self.taps}"
        if self.bias is not None:
            yield from of.long(self.bias, 1, width)


@dataclass(frozen=True)
class Delta(Op):
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024) over the state S of each head.

    x = [q | k | v] with `key_heads` heads of q and k, each for as many neighbouring heads of v, or, if
    `tiled`, for every `key_heads`-th head of v, as GGUF files order them; gates = [a | b], one of each for a
    head of v. The cache `state` keeps S, [heads, depth, head_dim] float32: heads
    of v, the length of a head of k, the length of a head of v. For each row, in order of positions:
    1. q and k have length 1: q / sqrt(Σ q² + eps), and q is multiplied by depth ** −0.5.
    2. S ← exp(−exp(a_log) · softplus(a + dt_bias)) · S
    3. S ← S + k ⊗ (σ(b) · (v − Sᵀ k))
    4. out = Sᵀ q, [heads · head_dim].
    """

    op: ClassVar = "delta"
    x: Input
    gates: Input
    state: Cache
    key_heads: int
    a_log: Vector
    dt_bias: Vector
    eps: float = 1e-6
    tiled: bool = False

    def out_width(self, of: Shapes) -> int:
        """heads·head_dim of the state."""
        return of.caches[self.state].kv_heads * of.caches[self.state].head_dim

    def problems(self, of: Shapes) -> Iterator[str]:
        """Heads of v must share heads of k evenly; x, the gates and their vectors must fit the heads."""
        yield from of.kept(self.state, "state")
        state = of.caches[self.state]
        if self.key_heads < 1 or state.kv_heads % self.key_heads:
            yield f"has {state.kv_heads} heads of values for {self.key_heads} heads of keys"
        yield from of.wide(self.x, 2 * self.key_heads * state.depth + state.kv_heads * state.head_dim)
        yield from of.wide(self.gates, 2 * state.kv_heads)
        yield from of.long(self.a_log, 1, state.kv_heads)
        yield from of.long(self.dt_bias, 1, state.kv_heads)


@dataclass(frozen=True)
class Ssm(Op):
    """The state space of Mamba-2 (Dao & Gu, "Transformers are SSMs", 2024) over the state S of each head.

    x = [x | B | C] with `groups` vectors of B and of C, each for as many neighbouring heads; dt has one value
    for a head, and so has each part of terms = [a_log | dt_bias | d]. The cache `state` keeps S, [heads,
    depth, head_dim] float32: the length of B and C, the length of a head of x. For each row, in order of
    positions:
    1. dt ← softplus(dt + dt_bias), but at least `least`, and at most `most` if it is set.
    2. S ← exp(−exp(a_log) · dt) · S + B ⊗ (dt · x)
    3. out = Sᵀ C + d · x, [heads · head_dim].
    """

    op: ClassVar = "ssm"
    x: Input
    dt: Input
    state: Cache
    groups: int
    terms: Vector
    least: float = 0.0
    most: float | None = None

    def out_width(self, of: Shapes) -> int:
        """heads·head_dim of the state."""
        return of.caches[self.state].kv_heads * of.caches[self.state].head_dim

    def problems(self, of: Shapes) -> Iterator[str]:
        """Heads must share groups evenly; x, dt and the terms must fit the heads."""
        yield from of.kept(self.state, "state")
        state = of.caches[self.state]
        if self.groups < 1 or state.kv_heads % self.groups:
            yield f"has {state.kv_heads} heads for {self.groups} groups"
        yield from of.wide(self.x, state.kv_heads * state.head_dim + 2 * self.groups * state.depth)
        yield from of.wide(self.dt, state.kv_heads)
        yield from of.long(self.terms, 1, 3 * state.kv_heads)
