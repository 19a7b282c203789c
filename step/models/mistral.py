"""Mistral: a llama whose layers may attend to a sliding window (Jiang et al., "Mistral 7B", 2023)."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json; a window applies to every layer, unless `layer_types` names those it applies to."""
    c = read_decoder(read, context)
    rotation = read_rope(read, c.head_dim, c.context)
    kind = "sliding_attention" if read.given("sliding_window") else "full_attention"
    windows = read_windows(read, c.layers, [kind] * c.layers)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in windows]
    return pre_norm(s, c, "mistral", layers, Mlp(c.inner, read_activation(read)))
