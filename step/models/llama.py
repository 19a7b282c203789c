"""Llama (also SmolLM2, TinyLlama, Yi and other plain descendants).

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023); grouped-query attention as in
Llama 2.
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
    order_of,
    read_activation,
    read_decoder,
)  # fmt: skip
from nearfar.step.experts import Block, block
from nearfar.step.model import Model
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    return plain(read, context, "llama")


def plain(read: ConfigReader, context: int | None, architecture: str) -> Model:
    """A llama with its two switches of biases, under the name `architecture`."""
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias
    )
    mlp = Mlp(c.inner, read_activation(read), read.flag("mlp_bias"))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, architecture, [attend] * c.layers, mlp)


def pre_norm(
    s: StepBuilder,
    c: Decoder,
    architecture: str,
    layers: Sequence[Attention],
    blocks: Block | Sequence[Block],
    embed_scale: float = 1.0,
    logit_scale: float = 1.0,
    offset: float = 0.0,
) -> Model:
    """A decoder whose layers normalize the input of their two blocks by RMS norms, with Llama's names.

    `blocks`: the second block of each layer, or of every layer. `offset`: 1 if the checkpoint stores the
    weights of norms as w − 1.
    """
    each = blocks if isinstance(blocks, Sequence) else [blocks] * c.layers
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, embed_scale)
    for i, attend in enumerate(layers):
        at = f"model.layers.{i}"
        normed = s.norm(x, f"{at}.input_layernorm.weight", c.eps, offset)
        x = s.add(x, attention(s, normed, i, attend, c.hidden))
        normed = s.norm(x, f"{at}.post_attention_layernorm.weight", c.eps, offset)
        x = s.add(x, block(s, normed, i, each[i], c.hidden))
    last = s.norm(x, "model.norm.weight", c.eps, offset, logit_scale)
    s.logits(last, "lm_head.weight", c.vocab, c.tied)
    return c.model(architecture, s.finish())
