"""Model architectures, one file each, found by the config's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from nearfar.errors import CheckpointError
from nearfar.step.config import ConfigReader
from nearfar.step.kinds import torch_refuses, writes_no_text
from nearfar.suggestions import suggested

if TYPE_CHECKING:
    from nearfar.step.model import Model

ALIASES: Mapping[str, str] = {"ministral": "mistral"}
"""Model types that are computed as another one is."""

NESTED: Mapping[str, str] = {"mistral3": "mistral", "gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Model types with a text model in `text_config`, and of which type that is where it does not say.

Only those are here whose text model computes within the whole as it does alone.
"""


class Architecture(Protocol):
    """What a file in this folder provides."""

    def model(self, read: ConfigReader, context: int | None = None) -> Model:
        """The model of a config.json, with no more than `context` positions; or CheckpointError."""
        ...


def architectures() -> list[str]:
    """The model types that can be built: those with a file, and those that are like one of them."""
    files = (path.stem for folder in __path__ for path in Path(folder).glob("*.py"))
    return sorted([*(name for name in files if not name.startswith("_")), *ALIASES])


def architecture(config: Mapping[str, Any], within: str = "") -> Architecture:
    """The architecture of a config.json, or CheckpointError naming the known ones.

    `within`: as for ConfigReader.
    """
    model_type = check_known(config, within)
    return cast(Architecture, import_module(f"{__name__}.{ALIASES.get(model_type, model_type)}"))


def check_known(config: Mapping[str, Any], within: str = "") -> str:
    """The model type of a config.json that there is a file for, or CheckpointError: what the model is where
    it writes no text, else the types that there are, and what else may answer. It imports none of them.
    """
    if what := writes_no_text(config, within=within):
        raise CheckpointError(f"config.json: {what}")
    model_type, known = config.get("model_type"), architectures()
    if not isinstance(model_type, str) or model_type not in known:
        told = f"has no {within}model_type" if model_type is None else f"{within}model_type is {model_type!r}"
        others = "nearfar serve tries others through transformers, without a build"
        if why := torch_refuses(config):
            others = (
                f"nearfar serve does not answer with it either, for {why}: nearfar serve URL goes in front "
                "of a server that does"
            )
        close = suggested(model_type, known) if isinstance(model_type, str) else ""
        raise CheckpointError(f"config.json: {told}{close}; nearfar can build: {', '.join(known)}. {others}")
    return model_type
