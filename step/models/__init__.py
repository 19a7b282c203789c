"""Model architectures, one file each, found by the config's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.model import Model

ALIASES: Mapping[str, str] = {"ministral": "mistral"}
"""Model types that are computed as another one is."""


class Architecture(Protocol):
    """What a file in this folder provides."""

    def model(self, read: ConfigReader, context: int | None = None) -> Model:
        """The model of a config.json, with no more than `context` positions; or CheckpointError."""
        ...


def architectures() -> list[str]:
    """The model types that can be built: those with a file, and those that are like one of them."""
    files = (path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    return sorted([*files, *ALIASES])


def architecture(config: Mapping[str, Any], within: str = "") -> Architecture:
    """The architecture of a config.json, or CheckpointError naming the known ones.

    `within`: as for ConfigReader.
    """
    model_type = config.get("model_type")
    known = architectures()
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"config.json: {within}model_type is {model_type!r}; nearfar can build: {', '.join(known)}. "
            "nearfar serve answers with others through transformers, without a build"
        )
    return cast(Architecture, import_module(f"{__name__}.{ALIASES.get(model_type, model_type)}"))
