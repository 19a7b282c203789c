"""Gemma 3, text ("Gemma 3 Technical Report", 2025).

Differences from Gemma 2: q and k of each head are normalized, five layers with a window stand to one without,
each kind has its own table of rotations, and only that of the layers without a window is stretched. There are
no caps.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Decoder, order_of, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models import gemma2
from nearfar.step.rope import THETA, Rotation, frequencies, padded, read_rope

DEFAULTS = {**gemma2.DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072}
PATTERN = 6  # every sixth layer has no window


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    gemma2.refuse_bidirectional(read)
    if read.given("attn_logit_softcapping"):
        read.refuse("attn_logit_softcapping", "null: Gemma 3 has no cap on attention scores")
    tables = {
        "local": local_rope(read, c, "rope_local_base_freq", 10000.0),
        "global": read_rope(read, c.head_dim, c.context, layer_type="full_attention", theta=1000000.0),
    }
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, scale=gemma2.query_scale(read), qkv_bias=bias, o_bias=bias,
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps, norm_offset=1.0,
    )  # fmt: skip
    s = StepBuilder()
    layers = []
    for window in read_windows(read, c.layers, layer_types(read, c.layers)):
        name = "global" if window is None else "local"
        table = s.rope(name, tables[name].rope)
        layers.append(replace(attend, rope=table, order=order_of(tables[name], c.head_dim), window=window))
    scale, cap = gemma2.embedding_scale(read, c.hidden), gemma2.read_cap(read, "final_logit_softcapping")
    mlp, norms = gemma2.read_mlp(read, c.inner), gemma2.Norms(offset=1.0)
    return gemma2.sandwich(s, c, "gemma3_text", layers, mlp, norms, scale, cap)


def layer_types(read: ConfigReader, layers: int) -> list[str]:
    """The types of layers if config.json lists none: every `sliding_window_pattern`-th layer has no
    window.
    """
    pattern = read.size("sliding_window_pattern", PATTERN, most=MAX_LAYERS)
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]


def local_rope(read: ConfigReader, c: Decoder, key: str, theta: float) -> Rotation:
    """The table of layers with a window: their section of `rope_parameters`, or else a plain table with base
    `key`.
    """
    if read.given("rope_parameters"):
        return read_rope(read, c.head_dim, c.context, layer_type="sliding_attention", theta=theta)
    base = read.number(key, theta, *THETA)
    return Rotation(padded(frequencies(base, c.head_dim), c.head_dim), c.head_dim)
