"""OLMoE ("OLMoE: Open Mixture-of-Experts Language Models", 2024): a llama with experts that normalizes q and
k each as a whole.
"""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.decoder import read_activation, read_decoder
from nearfar.step.experts import read_experts
from nearfar.step.model import Model
from nearfar.step.models.llama import pre_norm
from nearfar.step.models.olmo2 import EPS, read_attention
from nearfar.step.rope import read_rope


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context, eps=EPS)
    rotation = read_rope(read, c.head_dim, c.context)
    attend = read_attention(read, c, rotation)
    moe = replace(
        read_experts(read, c.inner, "num_experts"), activation=read_activation(read),
        normalize=0.0 if read.flag("norm_topk_prob") else None,
    )  # fmt: skip
    s = StepBuilder()
    s.rope("rope", rotation.rope)
    return pre_norm(s, c, "olmoe", [attend] * c.layers, moe)
