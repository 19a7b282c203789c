"""Mixtral (Jiang et al., "Mixtral of Experts", 2024): a Mistral with experts, whose chosen weights add up to
1.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Attention, order_of, read_activation, read_decoder
from nearfar.step.experts import read_experts
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.models.mistral import mistral_windows
from nearfar.step.rope import read_rope

EPS = 1e-5


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context)
    attend = Attention(c.heads, c.kv_heads, c.head_dim, "rope", order_of(rotation, c.head_dim))
    moe = replace(
        read_experts(read, c.inner, "num_local_experts"), activation=read_activation(read), normalize=0.0,
        at="block_sparse_moe", names=("w1", "w3", "w2"),
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    layers = [replace(attend, window=window) for window in mistral_windows(read, c.layers)]
    return pre_norm(s, c, "mixtral", layers, moe)
