"""Finds and reads a config's quantization settings; unknown settings are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.build.weights.container import Checkpoint, Stored

PLACES = ("quantization", "quantization_config", "compression_config")


def quantization_config(checkpoint: Checkpoint) -> Any:
    """The quantization settings of the config, or of the text model in it; None where there are none."""
    config = checkpoint.config
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        for place in PLACES:
            if section.get(place):
                return section[place]
    return None


def settings_of(checkpoint: Checkpoint, *methods: str) -> Mapping[str, Any] | None:
    """The quantization settings, if their `quant_method` is one of `methods`."""
    settings = quantization_config(checkpoint)
    if isinstance(settings, Mapping) and settings.get("quant_method") in methods:
        return settings
    return None


def matrices_of(checkpoint: Checkpoint, ending: str) -> dict[str, Stored]:
    """The matrices called `X<ending>`, by X."""
    return {
        name.removesuffix(ending): entry
        for name, entry in checkpoint.entries.items()
        if name.endswith(ending) and len(entry.shape) == 2
    }
