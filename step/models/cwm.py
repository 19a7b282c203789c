"""CWM (2025): a llama in which one layer of four attends to everything, the others to a window."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import (
    Attention,
    Decoder,
    Mlp,
    order_of,
    read_activation,
    read_decoder,
    read_windows,
)
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.rope import THETA as LIMITS
from nearfar.step.rope import Rotation, read_rope, rope_sections

DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192,
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
"""Defaults for keys that config.json lacks."""
ROPE = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""The rotation of a config.json that says nothing about it."""
EPS = 1e-5
THETA = 1000000.0
PATTERN = 4


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    read = read.filled(DEFAULTS)
    c = read_decoder(read, context, eps=EPS)
    rotation = _rotation(read, c)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim))
    types = ["sliding_attention" if i % PATTERN else "full_attention" for i in range(c.layers)]
    layers = [replace(attend, window=window) for window in read_windows(read, c.layers, types)]
    mlp = Mlp(c.inner, read_activation(read), read.flag("mlp_bias"))
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "cwm", layers, mlp)


def _rotation(read: ConfigReader, c: Decoder) -> Rotation:
    """The table of config.json, or ROPE if it has no section about rotations; a theta beside is then ignored
    by transformers, and refused here.
    """
    if rope_sections(read):
        return read_rope(read, c.head_dim, c.context, theta=THETA)
    if read.number("rope_theta", THETA, *LIMITS) != THETA:
        read.refuse("rope_theta", f"{THETA:g}, or rope_parameters with everything about the rotation")
    return read_rope(read.empty().filled({"rope_parameters": ROPE}), c.head_dim, c.context)
