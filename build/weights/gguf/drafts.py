"""Layers that draft tokens (multi-token prediction), which stand behind the model's own in files of GGUF.

llama.cpp counts them in `block_count`, and calls them `nextn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nearfar.step.config import MAX_LAYERS, ConfigReader

KEY = "nextn_predict_layers"
"""The number of layers that draft."""
BY_LAYER = (
    "attention.head_count", "attention.head_count_kv", "feed_forward_length", "attention.recurrent_layers",
    "attention.sliding_window_pattern",
)  # fmt: skip
"""Keys that may have a value for each layer."""


def drafting(given: Mapping[str, Any], file: str, prefix: str) -> int:
    """The number of layers that draft, by the keys of an architecture, which begin with `prefix` in the file.
    Raises CheckpointError if no layer would be left.
    """
    read = ConfigReader(given, file, prefix)
    count = read.size(KEY, 0, least=0, most=MAX_LAYERS)
    if count and count >= read.size("block_count", most=MAX_LAYERS):
        read.refuse(KEY, f"less than block_count, which is {given['block_count']}")
    return count


def without_drafts(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The keys of the same model without its last `count` layers, which draft."""
    out = {key: value for key, value in given.items() if key != KEY}
    if not count:
        return out
    layers = out["block_count"] - count
    cut = {key: out[key][:layers] for key in BY_LAYER if isinstance(out.get(key), np.ndarray | list)}
    return {**out, **cut, "block_count": layers}
