"""GLM-4 and GLM-Edge (2024): a llama that rotates neighbouring pairs, in half of each head."""

from __future__ import annotations

from nearfar.step.builder import StepBuilder
from nearfar.step.config import ConfigReader
from nearfar.step.model import Model
from nearfar.step.models.glm4 import read_blocks
from nearfar.step.models.llama import pre_norm


def model(read: ConfigReader, context: int | None = None) -> Model:
    """The model of a config.json."""
    c, rope, attend, mlp = read_blocks(read, context)
    s = StepBuilder()
    s.rope("rope", rope)
    return pre_norm(s, c, "glm", [attend] * c.layers, mlp)
