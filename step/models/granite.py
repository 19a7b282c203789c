"""Granite 3: a llama with the four multipliers of Yang et al., "Tensor Programs V" (2022).

None of them is an operation. With r the residual multiplier, x + r·f(x) is r·(x/r + f(x)): the stream runs
divided by r, so that the embedding is multiplied by 1/r and every norm, which takes the scale out again, has
eps/r². The attention multiplier is the scale of scores, and what divides the logits divides the weight of the
last norm.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Decoder, Mlp, order_of, read_activation, read_decoder
from nearfar.step.experts import Block
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

MULTIPLIER = (1e-4, 1e4)


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context)
    mlp = Mlp(c.inner, read_activation(read), read.flag("mlp_bias"))
    return multiplied(read, c, "granite", mlp)


def multiplied(read: ConfigReader, c: Decoder, architecture: str, block: Block) -> Model:
    """A llama with the multipliers of a config.json, whose layers have `block` for their second one."""
    rotation = read_rope(read, c.head_dim, c.context)
    embedding, attention, residual, logits = (
        read.number(key, 1.0, *MULTIPLIER)
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads,
        c.kv_heads,
        c.head_dim,
        "rope",
        order_of(rotation, c.head_dim),
        attention,
        qkv_bias=bias,
        o_bias=bias,
    )
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    stream = replace(c, eps=c.eps / residual**2)
    return pre_norm(s, stream, architecture, [attend] * c.layers, block, embedding / residual, 1 / logits)
