"""Qwen3: a llama that normalizes each head of queries and keys before it is rotated ("Qwen3 Technical Report", 2025)."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

HEAD_DIM = 128
"""Where config.json does not say: not hidden_size / heads, as a llama's."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, head_dim=HEAD_DIM)
    rotation = read_rope(read, c.head_dim, c.context)
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias,
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps,
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in qwen_windows(read, c.layers)]
    return pre_norm(s, c, "qwen3", layers, Mlp(c.inner, read_activation(read)))


def qwen_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Where windows are switched on, they apply to the layers from `max_window_layers` on (Qwen2, Qwen3)."""
    first = read.size("max_window_layers", 28, most=MAX_LAYERS, least=0)
    if not read.flag("use_sliding_window") or not read.given("sliding_window"):
        read.given("layer_types"), read.given("sliding_window")
        return (None,) * layers
    types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return read_windows(read, layers, types)
