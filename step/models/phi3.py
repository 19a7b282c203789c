"""Phi-3, 3.5 and 4-mini: a llama with joined projections ("Phi-3 Technical Report", 2024).

Long-context versions stretch positions by longrope; Phi-4-mini rotates three quarters of each head.
"""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import MAX_CONTEXT, ConfigReader
from nearfar.step.decoder import Attention, Mlp, order_of, read_activation, read_decoder
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import read_rope

KINDS = ("default", "longrope", "su")
EPS = 1e-5
ORIGINAL = 4096
"""Default of the number of positions before stretching."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context, kinds=KINDS, original=ORIGINAL, parts=True)
    # models whose context is not extended have this setting, too
    read.given("original_max_position_embeddings")
    window = read.size("sliding_window", most=MAX_CONTEXT) if read.given("sliding_window") else None
    attend = Attention(
        c.heads,
        c.kv_heads,
        c.head_dim,
        "rope",
        order_of(rotation, c.head_dim),
        window=window,
        names=("qkv_proj",),
    )
    mlp = Mlp(c.inner, read_activation(read), names=("gate_up_proj",))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "phi3", [attend] * c.layers, mlp)
