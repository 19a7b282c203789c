"""OLMo 3 (2025): an OLMo 2 in which three layers of four attend to a window; yarn stretches only
the others.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Mlp, order_of, read_activation, read_decoder, read_windows
from nearfar.step.model import Model
from nearfar.step.models.gemma3_text import local_rope
from nearfar.step.models.olmo2 import EPS, post_norm, read_attention
from nearfar.step.rope import THETA, read_rope

BASE = 500000.0
WINDOW = 4096


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled({"sliding_window": WINDOW})
    c = read_decoder(read, context, eps=EPS)
    if not read.given("rope_parameters") and read.number("rope_theta", BASE, *THETA) != BASE:
        # transformers then keeps BASE for layers with a window, and other readers do not
        read.refuse("rope_theta", f"{BASE:g}, or rope_parameters with a table for each type of layer")
    tables = {
        "local": local_rope(read, c, "rope_theta", BASE),
        "global": read_rope(read, c.head_dim, c.context, layer_type="full_attention", theta=BASE),
    }
    attend = read_attention(read, c, tables["global"])
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(c.layers)]
    s = StepBuilder()
    layers = []
    for window in read_windows(read, c.layers, types):
        name = "global" if window is None else "local"
        table = s.rope(name, tables[name].rope)
        layers.append(replace(attend, rope=table, order=order_of(tables[name], c.head_dim), window=window))
    return post_norm(s, c, "olmo3", layers, Mlp(c.inner, read_activation(read)))
