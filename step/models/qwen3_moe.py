"""Qwen3 with experts ("Qwen3 Technical Report", 2025)."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_CONTEXT, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.experts import read_experts, sparse_layers
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    return with_experts(read, context, "qwen3_moe")


def with_experts(
    read: ConfigReader, context: int | None, name: str, apart: bool = True, transposed: bool = False
) -> Model:
    """The model of a config.json, called `name`. `apart`, `transposed`: how its checkpoints store experts;
    see Moe.
    """
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    bias, act = read.flag("attention_bias"), read_activation(read)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim), qkv_bias=bias, o_bias=bias,
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps, window=_window(read),
    )  # fmt: skip
    inner = read.size("moe_intermediate_size", 768)
    moe = replace(
        read_experts(read, inner, "num_local_experts", "num_experts"), activation=act, apart=apart,
        transposed=transposed,
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    blocks = sparse_layers(read, moe, Mlp(c.inner, act), c.layers)
    return pre_norm(s, c, name, [attend] * c.layers, blocks)


def _window(read: ConfigReader) -> int | None:
    """The window of every layer, if `use_sliding_window` switches it on."""
    read = read.filled({"sliding_window": 4096})
    read.given("max_window_layers")  # transformers' class has no such key: its layers are all alike
    if not read.flag("use_sliding_window") or not read.given("sliding_window"):
        return None
    return read.size("sliding_window", most=MAX_CONTEXT)
