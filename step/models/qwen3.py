"""Qwen3: a llama that normalizes each head of queries and keys before it is rotated.

"Qwen3 Technical Report" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.models.qwen2 import qwen_windows
from nearfar.step.rope import read_rope

HEAD_DIM = 128
"""Default of `head_dim`; a llama's default is hidden_size / heads."""


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
