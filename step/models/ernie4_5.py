"""ERNIE 4.5, dense (2025): a llama that rotates neighbouring pairs, with one switch for all biases."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
THETA = 500000.0


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context, theta=THETA)
    order, bias = order_of(rotation, c.head_dim, interleaved=True), read.flag("use_bias")
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order, qkv_bias=bias, o_bias=bias)
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "ernie4_5", [attend] * c.layers, Mlp(c.inner, read_activation(read), bias))
