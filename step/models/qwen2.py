"""Qwen2 and 2.5: a llama whose queries, keys and values have biases, whatever `attention_bias` says.

"Qwen2 Technical Report" (2024).
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    order = order_of(rotation, c.head_dim)
    read.given("attention_bias")
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order, qkv_bias=True)
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in qwen_windows(read, c.layers)]
    return pre_norm(s, c, "qwen2", layers, Mlp(c.inner, read_activation(read)))


def qwen_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer of Qwen2 and Qwen3: if windows are on, layers from `max_window_layers` on have
    one.
    """
    read = read.filled({"sliding_window": 4096})
    first = read.size("max_window_layers", 28, most=MAX_LAYERS, least=0)
    on = read.flag("use_sliding_window") and read.given("sliding_window")
    types = ["sliding_attention" if on and layer >= first else "full_attention" for layer in range(layers)]
    return read_windows(read, layers, types, allowed=on)
