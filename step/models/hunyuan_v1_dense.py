"""Hunyuan, dense (2025): a llama that normalizes each head of queries and keys after it has been rotated."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

EPS = 1e-5


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context, alpha=True)
    if not read.flag("use_qk_norm", True):
        read.refuse("use_qk_norm", "true: queries and keys are always normalized")
    if read.flag("use_cla"):
        read.refuse("use_cla", "false: layers that share keys and values are not supported")
    bias = read.flag("attention_bias")
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias,
        q_norm="query_layernorm", k_norm="key_layernorm", norm_eps=c.eps, norm_after=True,
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "hunyuan_v1_dense", [attend] * c.layers, Mlp(c.inner, read_activation(read)))
