"""LFM2 with experts (8B-A1B): sigmoids of the router's logits weigh them, and a bias balances their use."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Mlp
from nearfar.step.experts import Block, read_experts
from nearfar.step.model import Model
from nearfar.step.models.lfm2 import AT, NAMES, convolving, read_sizes

DEFAULTS = {"num_experts": 32, "num_experts_per_tok": 4}
SCALE = (1e-4, 1e4)
EPS = 1e-6
"""Added to the sum that the weights of the chosen experts are divided by."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json, whose first layers have an MLP instead of experts."""
    read = read.filled(DEFAULTS)
    c = read_sizes(read, context)
    moe = replace(
        read_experts(read, read.size("moe_intermediate_size", 1792), "num_experts"), score="sigmoid",
        normalize=EPS if read.flag("norm_topk_prob", True) else None,
        scale=read.number("routed_scaling_factor", 1.0, *SCALE),
        bias="expert_bias" if read.flag("use_expert_bias", True) else None, at=AT, names=NAMES,
    )  # fmt: skip
    mlp = Mlp(c.inner, names=NAMES[:2], down=NAMES[2])
    dense = read.size("num_dense_layers", 2, least=0)
    blocks: list[Block] = [mlp if layer < dense else moe for layer in range(c.layers)]
    return convolving(read, c, "lfm2_moe", blocks)
