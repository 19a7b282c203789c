"""OLMo 2 ("2 OLMo 2 Furious", 2024): a norm follows each block instead of preceding it; q and k are each
normalized as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import (
    Attention,
    Decoder,
    Mlp,
    attention,
    gated_mlp,
    order_of,
    read_activation,
    read_decoder,
)
from nearfar.step.model import Model
from nearfar.step.rope import Rotation, read_rope

EPS = 1e-5


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context)
    attend = read_attention(read, c, rotation)
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return post_norm(s, c, "olmo2", [attend] * c.layers, Mlp(c.inner, read_activation(read)))


def read_attention(read: ConfigReader, c: Decoder, rotation: Rotation) -> Attention:
    """Attention with biases as the config says, and with norms of q and k as a whole."""
    bias = read.flag("attention_bias")
    return Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias,
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps, norm_all=True,
    )  # fmt: skip


def post_norm(s: StepBuilder, c: Decoder, architecture: str, layers: Sequence[Attention], mlp: Mlp) -> Model:
    """A decoder whose layers normalize the output of their two blocks."""
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden)
    for i, attend in enumerate(layers):
        at = f"model.layers.{i}"
        h = attention(s, x, i, attend, c.hidden)
        x = s.add(x, s.norm(h, f"{at}.post_attention_layernorm.weight", c.eps))
        h = gated_mlp(s, x, i, mlp, c.hidden)
        x = s.add(x, s.norm(h, f"{at}.post_feedforward_layernorm.weight", c.eps))
    s.logits(s.norm(x, "model.norm.weight", c.eps), "lm_head.weight", c.vocab, c.tied)
    return c.model(architecture, s.finish())
