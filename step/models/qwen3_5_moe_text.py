"""Qwen 3.5 and 3.6 with experts (35B-A3B, 2026): in every layer, beside a shared one that a gate weighs."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.config import ConfigReader
from nearfar.step.decoder import read_activation, read_decoder
from nearfar.step.experts import read_experts
from nearfar.step.model import Model
from nearfar.step.models.qwen2_moe import read_shared
from nearfar.step.models.qwen3_5_text import HEAD_DIM, recurrent

INNER = 512
DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8}


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    inner = read.size("moe_intermediate_size", INNER)
    read = read.filled({**DEFAULTS, "intermediate_size": inner})  # no layer has another MLP
    c = read_decoder(read, context, head_dim=HEAD_DIM)
    moe = replace(
        read_experts(read, inner, "num_experts"), activation=read_activation(read), normalize=0.0,
        shared=read_shared(read, INNER), apart=False,
    )  # fmt: skip
    return recurrent(read, c, "qwen3_5_moe_text", moe)
