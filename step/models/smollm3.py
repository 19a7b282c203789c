"""SmolLM3 (2025): a llama of which every fourth layer does not rotate.

Yang et al., "Rope to Nope and Back Again" (2025).
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}
THETA = 2000000.0


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context, theta=THETA)
    order, bias = order_of(rotation, c.head_dim), read.flag("attention_bias")
    attend = Attention(c.heads, c.kv_heads, c.head_dim, qkv_bias=bias, o_bias=bias)
    rotates = _rotates(read, c.layers)
    s = StepBuilder()
    rope = s.rope("rope", rotation.rope)
    layers = [
        replace(attend, rope=rope if turns else None, order=order if turns else None, window=window)
        for turns, window in zip(rotates, _windows(read, rotates), strict=True)
    ]
    return pre_norm(s, c, "smollm3", layers, Mlp(c.inner, read_activation(read), read.flag("mlp_bias")))


def _rotates(read: ConfigReader, layers: int) -> list[bool]:
    """For each layer whether it rotates. In `no_rope_layers` a 1 means that the layer does rotate, despite
    the name.
    """
    interval = read.size("no_rope_layer_interval", 4, most=MAX_LAYERS)
    if read.given("no_rope_layers"):
        return [value != 0 for value in read.numbers("no_rope_layers", layers, 0, 1)]
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _windows(read: ConfigReader, rotates: list[bool]) -> tuple[int | None, ...]:
    """The window of each layer: if windows are on, layers that do not rotate have one."""
    on = read.flag("use_sliding_window") and read.given("sliding_window")
    types = ["sliding_attention" if on and not turns else "full_attention" for turns in rotates]
    return read_windows(read, len(rotates), types, allowed=on)
