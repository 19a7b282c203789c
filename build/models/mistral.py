"""Mistral: a llama whose layers may attend to a sliding window (Jiang et al., "Mistral 7B", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nearfar.build.config import ConfigReader, ModelConfig
from nearfar.build.models import llama
from nearfar.build.models.llama import params, step
from nearfar.errors import CheckpointError

__all__ = ["params", "parse", "step"]

LAYER_TYPES = ("full_attention", "sliding_attention")


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Read a mistral config.json; a window applies to every layer, unless `layer_types` names the layers it applies to."""
    read, plain = ConfigReader(config), replace(llama.parse(config), architecture="mistral")
    window = read.get("sliding_window")
    if window is None:
        return plain
    types = tuple(read.get("layer_types", ("sliding_attention",) * plain.layers))
    if len(types) != plain.layers or not set(types) <= set(LAYER_TYPES):
        raise CheckpointError(
            f"config.json: layer_types is {list(types)!r}; expected {plain.layers} times {' or '.join(LAYER_TYPES)}"
        )
    if "sliding_attention" not in types:
        return plain
    return replace(plain, sliding_window=read.size("sliding_window"), layer_types=types)
