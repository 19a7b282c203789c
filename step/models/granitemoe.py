"""Granite 3 with experts (1B-A400M, 3B-A800M): their weights are a softmax over the chosen logits alone."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.config import ConfigReader
from nearfar.step.decoder import read_activation, read_decoder
from nearfar.step.experts import read_experts
from nearfar.step.model import Model
from nearfar.step.models.granite import multiplied

STACKED = ("input_linear.weight", "output_linear.weight")


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context)
    moe = replace(
        read_experts(read, c.inner, "num_local_experts"), activation=read_activation(read), normalize=0.0,
        at="block_sparse_moe", router="router.layer", stacked=STACKED, apart=False,
    )  # fmt: skip
    return multiplied(read, c, "granitemoe", moe)
