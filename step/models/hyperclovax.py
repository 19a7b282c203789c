"""HyperCLOVA X SEED (2025): a Granite with norms of what its blocks add, and logits that are multiplied."""

from __future__ import annotations

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
from nearfar.step.model import Model
from nearfar.step.models.granite import MULTIPLIER
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json. The stream is divided by the residual multiplier, as in granite.py."""
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    embedding, residual, logits = (
        read.number(key, 1.0, *MULTIPLIER)
        for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    )
    scale = read.number("attention_multiplier", c.head_dim**-0.5, *MULTIPLIER)
    bias, normed = read.flag("attention_bias"), read.flag("use_post_norm", True)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), scale, qkv_bias=bias,
        o_bias=bias,
    )  # fmt: skip
    mlp = Mlp(c.inner, read_activation(read), read.flag("mlp_bias"))
    eps = c.eps / residual**2
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, embedding / residual)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        h = attention(s, s.norm(x, f"{at}.input_layernorm.weight", eps), i, attend, c.hidden)
        x = s.add(x, s.norm(h, f"{at}.post_norm1.weight", c.eps) if normed else h)
        h = gated_mlp(s, s.norm(x, f"{at}.post_attention_layernorm.weight", eps), i, mlp, c.hidden)
        x = s.add(x, s.norm(h, f"{at}.post_norm2.weight", c.eps) if normed else h)
    s.logits(s.norm(x, "model.norm.weight", eps, scale=logits), "lm_head.weight", c.vocab, c.tied)
    return c.model("hyperclovax", s.finish())
