"""Mistral: a llama whose layers may attend to a sliding window (Jiang et al., "Mistral 7B", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nearfar.step.config import LAYER_TYPES, ConfigReader, ModelConfig
from nearfar.step.models import llama
from nearfar.step.models.llama import params, step

__all__ = ["params", "parse", "step"]


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Read a mistral config.json; a window applies to every layer, unless `layer_types` names the layers it applies to."""
    read, plain = ConfigReader(config), replace(llama.parse(config), architecture="mistral")
    if not read.given("sliding_window"):
        return plain
    types = read.choices("layer_types", LAYER_TYPES, ("sliding_attention",) * plain.layers)
    if "sliding_attention" not in types:
        return plain
    return replace(plain, sliding_window=read.size("sliding_window"), layer_types=types)
