"""Qwen3: a llama that normalizes each head of queries and keys before it is rotated (Qwen Team, "Qwen3 Technical Report", 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nearfar.step.config import LAYER_TYPES, MAX_LAYERS, ConfigReader, ModelConfig
from nearfar.step.models import llama
from nearfar.step.models.llama import params, step

__all__ = ["params", "parse", "step"]

HEAD_DIM = 128
"""Where config.json does not say: not hidden_size / heads, as a llama's."""


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Read a qwen3 config.json; where windows are switched on, they apply to the layers from `max_window_layers` on."""
    read = ConfigReader(config)
    head_dim = read.size("head_dim", HEAD_DIM)
    plain = replace(llama.parse({**config, "head_dim": head_dim}), architecture="qwen3", qk_norm=True)
    if not read.flag("use_sliding_window") or not read.given("sliding_window"):
        return plain
    first = read.size("max_window_layers", 28, most=MAX_LAYERS, least=0)
    types = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(plain.layers))
    types = read.choices("layer_types", LAYER_TYPES, types)
    if "sliding_attention" not in types:
        return plain
    return replace(plain, sliding_window=read.size("sliding_window"), layer_types=types)
