"""Mistral: a llama whose layers may attend to a sliding window (Jiang et al., "Mistral 7B", 2023).

Ministral (2410) differs only in that some of its layers have no window.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

DEFAULTS = {"sliding_window": 4096}
"""Default of `sliding_window`; null means that there is no window."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in mistral_windows(read, c.layers)]
    return pre_norm(s, c, "mistral", layers, Mlp(c.inner, read_activation(read)))


def mistral_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: every layer has it, unless `layer_types` names the layers that do."""
    kind = "sliding_attention" if read.given("sliding_window") else "full_attention"
    return read_windows(read, layers, [kind] * layers)
