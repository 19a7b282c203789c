"""The mixer of Mamba-2 (Dao & Gu, "Transformers are SSMs", 2024): a projection to [z | x | B | C | dt], a
short convolution of [x | B | C], the state space, a gate with z, a norm, and a projection back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Never

from nearfar.step import ops
from nearfar.step.builder import StepBuilder, Value
from nearfar.step.config import ConfigReader
from nearfar.step.operation import Activation
from nearfar.step.params import TensorPiece
from nearfar.strict_json import INFINITY

MAX_DT = 1e30
"""The largest upper limit of dt that is not infinite."""


@dataclass(frozen=True)
class Factors:
    """Numbers that the values of a mixer are multiplied by: its input; z, x, B, C and dt; its output."""

    input: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True)
class Mamba:
    """The mixer of a layer. `depth`: the length of B and C. `limits`: the least dt, and the largest, if any.

    `norm`: whether the norm, of each group separately, follows the gate or comes before it; None: no norm.
    """

    heads: int
    head_dim: int
    groups: int
    depth: int
    taps: int
    activation: Activation
    eps: float
    limits: tuple[float, float | None] = (0.0, None)
    norm: Literal["after", "before"] | None = "after"
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    factors: Factors = Factors()

    @property
    def inner(self) -> int:
        """Columns of x, and of z."""
        return self.heads * self.head_dim


def check_groups(read: ConfigReader, m: Mamba) -> Mamba:
    """The mixer itself; CheckpointError if its heads cannot share its groups evenly."""
    if m.heads % m.groups:
        raise read.error(f"{m.heads} heads of the state cannot share {m.groups} groups evenly")
    return m


def read_mamba(read: ConfigReader, inner: int, activation: Activation, eps: float) -> Mamba:
    """Read a mixer of `inner` columns from the keys `mamba_*` and `time_step_limit`."""
    heads = read.size("mamba_n_heads", 128)
    if inner % heads:
        raise read.error(f"mamba_n_heads is {heads}, and does not divide the {inner:,} columns of the mixer")
    given = read.config.get("mamba_d_head")
    head_dim = read.size("mamba_d_head", inner // heads) if given != "auto" else inner // heads
    if head_dim * heads != inner:
        raise read.error(f"{heads} heads of {head_dim} (mamba_d_head) are not the mixer's {inner:,} columns")
    read.given("mamba_d_head")
    read.given("mamba_chunk_size")  # the result does not depend on how a text is cut into chunks
    bias = read.flag("mamba_proj_bias")
    mixer = Mamba(
        heads, head_dim, read.size("mamba_n_groups", 1), read.size("mamba_d_state", 256),
        read.size("mamba_d_conv", 4), activation, eps, read_limits(read),
        conv_bias=read.flag("mamba_conv_bias", True), in_bias=bias, out_bias=bias,
    )  # fmt: skip
    return check_groups(read, mixer)


def read_limits(read: ConfigReader, key: str = "time_step_limit") -> tuple[float, float | None]:
    """The limits of dt. transformers writes infinity as an object; the list may also be absent."""

    def refuse() -> Never:
        read.refuse(key, "two numbers, 0 or more, of which the second may be infinite")

    if not read.given(key):
        return 0.0, None
    found = read.config[key]
    if not isinstance(found, list) or len(found) != 2:
        refuse()
    least, most = (float("inf") if value == INFINITY else value for value in found)
    for value in (least, most):
        if type(value) not in (int, float) or not value >= 0:
            refuse()
    if not least <= MAX_DT or most < least:
        refuse()
    return float(least), float(most) if most <= MAX_DT else None


def mamba(s: StepBuilder, x: Value, layer: int, m: Mamba, hidden: int, at: str = "mamba") -> Value:
    """The mixer of a layer: [M, hidden].

    Factors cost little: those of x, B and C are part of the convolution's weights, and that of the output is
    part of the norm's, where it is the last operation before the projection.
    """
    source, name, f = f"model.layers.{layer}.{at}", f"layers.{layer}", m.factors
    inner, mixed = m.inner, m.inner + 2 * m.groups * m.depth
    joined = TensorPiece(f"{source}.in_proj.weight", inner + mixed + m.heads)
    zxbcdt = s.linear(x, f"{name}.ssm_in", (joined,), m.in_bias, 1 / f.input)
    z = s.times(s.columns(zxbcdt, 0, inner), f.input * f.z)
    dt = s.times(s.columns(zxbcdt, inner + mixed, m.heads), f.input * f.dt)
    of_group = m.groups * m.depth
    scales = [(inner, f.input * f.x), (of_group, f.input * f.b), (of_group, f.input * f.c)]
    parts = scales if len({scale for _, scale in scales}) > 1 else [(mixed, f.input * f.x)]
    xbc = s.conv(
        s.columns(zxbcdt, inner, mixed), f"{source}.conv1d", m.taps, m.activation, m.conv_bias, parts
    )
    pieces = [TensorPiece(f"{source}.{each}", m.heads) for each in ("A_log", "dt_bias", "D")]
    terms, state = s.vector(f"{name}.ssm_terms", pieces), s.state(m.heads, m.depth, m.head_dim)
    y = s.append(ops.Ssm(s.fresh("ssm"), xbc.name, dt.name, state, m.groups, terms, *m.limits))
    gate = s.act(z, "silu")

    def norm(value: Value) -> Value:
        return s.norm(value, f"{source}.norm.weight", m.eps, scale=f.output, groups=m.groups, each=True)

    match m.norm:
        case "after":
            out = norm(s.mul(y, gate))
        case "before":
            out = s.mul(norm(y), gate)
        case None:
            out = s.mul(y, s.times(gate, f.output))
    last = TensorPiece(f"{source}.out_proj.weight", hidden)
    return s.linear(out, f"{name}.ssm_out", (last,), m.out_bias, f.output)
