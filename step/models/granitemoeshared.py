"""Granite 3 with experts and, in every layer, an MLP that all tokens have."""

from __future__ import annotations

from dataclasses import replace

from nearfar.step.config import ConfigReader
from nearfar.step.decoder import read_activation, read_decoder
from nearfar.step.experts import Shared
from nearfar.step.model import Model
from nearfar.step.models.granite import multiplied
from nearfar.step.models.granitemoe import SHARED, granite_experts, shared_mlp


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c, activation = read_decoder(read, context), read_activation(read)
    moe = granite_experts(read, c.inner, activation)
    if wide := read.size("shared_intermediate_size", 0, least=0):
        moe = replace(moe, shared=Shared(shared_mlp(wide, activation, ("input_linear",)), SHARED))
    return multiplied(read, c, "granitemoeshared", moe)
