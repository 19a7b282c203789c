"""Gemma 2 ("Gemma 2: Improving Open Language Models at a Practical Size", 2024).

Differences from a llama: norms before and after each block, with weights that the checkpoint stores as w − 1;
an embedding times √hidden; GELU; tanh caps on attention scores and logits; every second layer attends to a
window.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    read_windows,
)
from nearfar.step.model import Model
from nearfar.step.rope import read_rope

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
"""Defaults for keys that config.json lacks."""
CAP = (1e-3, 1e6)
PRE_ATTENTION = (1e-3, 1e6)


@dataclass(frozen=True)
class Norms:
    """Names of a layer's four norms, in order; `offset` is 1 if their weights are stored as w − 1."""

    attention: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    mlp: tuple[str, str] = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    offset: float = 0.0


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled({**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
    c = read_decoder(read, context)
    refuse_bidirectional(read)
    rotation = read_rope(read, c.head_dim, c.context)
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), query_scale(read),
        softcap=read_cap(read, "attn_logit_softcapping"), qkv_bias=bias, o_bias=bias,
    )  # fmt: skip
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(c.layers)]
    layers = [replace(attend, window=window) for window in read_windows(read, c.layers, types)]
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    scale, cap = embedding_scale(read, c.hidden), read_cap(read, "final_logit_softcapping")
    return sandwich(s, c, "gemma2", layers, read_mlp(read, c.inner), Norms(offset=1.0), scale, cap)


def sandwich(
    s: StepBuilder, c: Decoder, architecture: str, layers: Sequence[Attention], mlp: Mlp, norms: Norms,
    embed_scale: float = 1.0, softcap: float | None = None,
) -> Model:  # fmt: skip
    """A decoder whose layers normalize both the input and the output of their two blocks."""
    x = s.embed("model.embed_tokens.weight", c.vocab, c.hidden, embed_scale)
    for i, attend in enumerate(layers):
        at = [f"model.layers.{i}.{name}.weight" for name in (*norms.attention, *norms.mlp)]
        h = attention(s, s.norm(x, at[0], c.eps, norms.offset), i, attend, c.hidden)
        x = s.add(x, s.norm(h, at[1], c.eps, norms.offset))
        h = gated_mlp(s, s.norm(x, at[2], c.eps, norms.offset), i, mlp, c.hidden)
        x = s.add(x, s.norm(h, at[3], c.eps, norms.offset))
    normed = s.norm(x, "model.norm.weight", c.eps, norms.offset)
    s.logits(normed, "lm_head.weight", c.vocab, c.tied, softcap=softcap)
    return c.model(architecture, s.finish())


def embedding_scale(read: ConfigReader, width: int) -> float:
    """√width, rounded to the checkpoint's dtype: bfloat16 makes 34 of √1152 = 33.94."""
    scale = math.sqrt(width)
    dtype = read.choice("dtype", DTYPES, read.choice("torch_dtype", DTYPES, "float32"))
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", scale))[0])
    if dtype == "bfloat16":
        bits = struct.unpack("<I", struct.pack("<f", scale))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return scale


DTYPES = ("float32", "bfloat16", "float16")


def query_scale(read: ConfigReader) -> float:
    """The factor of attention scores: 1/√query_pre_attn_scalar, whose default is in DEFAULTS."""
    return 1.0 / math.sqrt(read.number("query_pre_attn_scalar", None, *PRE_ATTENTION))


def read_cap(read: ConfigReader, key: str) -> float | None:
    """The tanh cap in `key`; None if there is none."""
    return read.number(key, None, *CAP) if read.given(key) else None


def read_mlp(read: ConfigReader, inner: int) -> Mlp:
    """Gemma's MLP: its activation is `hidden_activation`; the older `hidden_act` is ignored."""
    read.given("hidden_act")
    return Mlp(inner, read_activation(read, "hidden_activation"))


def refuse_bidirectional(read: ConfigReader) -> None:
    """Refuse encoders made of Gemma, which also attend to later positions."""
    if read.given("use_bidirectional_attention") and read.flag("use_bidirectional_attention"):
        read.refuse("use_bidirectional_attention", "false: only causal attention is supported")
