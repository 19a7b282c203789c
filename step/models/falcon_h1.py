"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors at many places.

Most factors need no operation. With r the factor of an MLP's output over that of its gate, the stream runs
divided by r, as in granite.py; the gate's factor is part of the norm before it, whose other half, up, it
multiplies as well. Scores take the factors of queries and keys. The output of attention takes those of its
input and output, for values are linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import (
    Attention,
    Mlp,
    attention,
    gated_mlp,
    order_of,
    read_activation,
    read_decoder,
)
from nearfar.step.mamba import Factors, Mamba, mamba, read_mamba
from nearfar.step.model import Model
from nearfar.step.models.granite import MULTIPLIER
from nearfar.step.operation import Activation
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=1e-5)
    read.given("num_logits_to_keep")  # about transformers' generate
    activation = read_activation(read)

    def number(key: str) -> float:
        return read.number(f"{key}_multiplier", 1.0, *MULTIPLIER)

    gate, down = _numbers(read, "mlp_multipliers", 2)
    rotation = read_rope(read, c.head_dim, c.context)
    attended, scores = number("attention_in"), number("key")
    bias, mlp_bias = read.flag("attention_bias"), read.flag("mlp_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim),
        attended**2 * scores * c.head_dim**-0.5, qkv_bias=bias, o_bias=bias, bias_scale=1 / attended,
    )  # fmt: skip
    mlp = Mlp(c.inner, activation, mlp_bias, bias_scale=gate)
    residual = down / gate
    z, inner, b, kept, dt = _numbers(read, "ssm_multipliers", 5)
    factors = Factors(number("ssm_in"), z, inner, b, kept, dt, number("ssm_out") / residual)
    mixer = replace(_mixer(read, c.hidden, activation, c.eps), factors=factors)
    out = attended * number("attention_out") / residual
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    eps = c.eps / residual**2
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, number("embedding") / residual)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        h = s.norm(x, f"{at}.input_layernorm.weight", eps)
        x = s.add(x, s.times(attention(s, h, i, attend, c.hidden), out))
        x = s.add(x, mamba(s, h, i, mixer, c.hidden))
        h = s.norm(x, f"{at}.pre_ff_layernorm.weight", eps, scale=gate)
        x = s.add(x, gated_mlp(s, h, i, mlp, c.hidden, "feed_forward"))
    h = s.norm(x, "model.final_layernorm.weight", eps, scale=number("lm_head"))
    s.logits(h, "lm_head.weight", c.vocab, c.tied)
    return c.model("falcon_h1", s.finish())


def _mixer(read: ConfigReader, hidden: int, activation: Activation, eps: float) -> Mamba:
    """The mixer of a layer, of `mamba_d_ssm` columns; null means `mamba_expand` times those of the stream."""
    expand = read.size("mamba_expand", 2)
    null = "mamba_d_ssm" in read.config and not read.given("mamba_d_ssm")
    inner = expand * hidden if null else read.size("mamba_d_ssm", 1024)
    before = read.flag("mamba_norm_before_gate", True)
    norm: Literal["after", "before"] = "before" if before else "after"
    return replace(
        read_mamba(read, inner, activation, eps),
        norm=norm if read.flag("mamba_rms_norm") else None,
        out_bias=read.flag("projectors_bias"),
    )


def _numbers(read: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """`count` factors, which may be absent."""
    return read.numbers(key, count, *MULTIPLIER) if read.given(key) else (1.0,) * count
