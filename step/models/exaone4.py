"""EXAONE 4 (2025): norms follow each block, and q and k are normalized head by head.

In models with windows, layers without a window do not rotate.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_LAYERS, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.olmo2 import EPS, post_norm
from nearfar.step.rope import read_rope

PATTERN = 4
WINDOW = 4096
"""Default of `sliding_window`; null means that there is no window."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled({"sliding_window": WINDOW})
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context)
    attend = Attention(
        c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim),
        q_norm="q_norm", k_norm="k_norm", norm_eps=c.eps,
    )  # fmt: skip
    hybrid = read.given("sliding_window")
    windows = read_windows(read, c.layers, layer_types(read, c.layers, hybrid))
    still = replace(attend, rope=None, order=None)
    s = StepBuilder()
    layers = [replace(still if hybrid and window is None else attend, window=window) for window in windows]
    if any(layer.rope for layer in layers):
        s.rope("rope", rotation.rope)
    return post_norm(s, c, "exaone4", layers, Mlp(c.inner, read_activation(read)))


def layer_types(read: ConfigReader, layers: int, hybrid: bool) -> list[str]:
    """The types of layers if config.json lists none: every `sliding_window_pattern`-th layer has no
    window.
    """
    if read.given("layer_types") or not hybrid:
        read.given("sliding_window_pattern")
        return ["full_attention"] * layers
    pattern = read.size("sliding_window_pattern", PATTERN, most=MAX_LAYERS)
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
