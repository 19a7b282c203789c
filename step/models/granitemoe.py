"""Granite 3 with experts (1B-A400M, 3B-A800M): their weights are a softmax over the chosen logits alone."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.config import ConfigReader
from nearfar.step.decoder import Mlp, read_activation, read_decoder
from nearfar.step.experts import Moe, read_experts
from nearfar.step.model import Model
from nearfar.step.models.granite import multiplied
from nearfar.step.operation import Activation

STACKED = ("input_linear.weight", "output_linear.weight")
SHARED = "shared_mlp"
"""The name of the MLP that every token has, in the models that have one."""


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c = read_decoder(read, context)
    return multiplied(read, c, "granitemoe", granite_experts(read, c.inner, read_activation(read)))


def shared_mlp(wide: int, activation: Activation, names: tuple[str, ...]) -> Mlp:
    """The MLP that every token has. `names`: the tensors of gate and up, or the one that has both."""
    return Mlp(wide, activation, names=names, down="output_linear")


def granite_experts(read: ConfigReader, inner: int, activation: Activation) -> Moe:
    """The experts of a layer, as all of Granite's models have them."""
    return replace(
        read_experts(read, inner, "num_local_experts"), activation=activation, normalize=0.0,
        at="block_sparse_moe", router="router.layer", stacked=STACKED, apart=False,
    )  # fmt: skip
