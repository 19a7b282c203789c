"""Seed-OSS (2025): a llama with switches of its own for the biases of attention's input and output."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    read.given("residual_dropout")  # has an effect only in training
    rotation = read_rope(read, c.head_dim, c.context)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim),
        qkv_bias=read.flag("attention_bias"), o_bias=read.flag("attention_out_bias"),
    )  # fmt: skip
    mlp = Mlp(c.inner, read_activation(read), read.flag("mlp_bias"))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "seed_oss", [attend] * c.layers, mlp)
