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
"""Model types that are computed like another type."""

NESTED: Mapping[str, str] = {
    "mistral3": "mistral", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text",
}  # fmt: skip
"""Model types whose text model is in `text_config`, each with the type of that text model if the config does
not name it.

A type is listed only if its text model computes the same inside the whole as on its own.
"""


class Architecture(Protocol):
    """The interface of a model file in this folder."""

    def model(self, read: ConfigReader, context: int | None = None) -> Model:
        """The model of a config.json, with at most `context` positions; CheckpointError if it is not
        supported.
        """
        ...


def architectures() -> list[str]:
    """The model types that can be built: those with a file, and their aliases."""
    files = (path.stem for folder in __path__ for path in Path(folder).glob("*.py"))
    return sorted([*(name for name in files if not name.startswith("_")), *ALIASES])


def architecture(config: Mapping[str, Any], within: str = "") -> Architecture:
    """The architecture of a config.json; CheckpointError, which names the known ones, if there is none.

    `within`: as for ConfigReader.
    """
    model_type = check_known(config, within)
    return cast(Architecture, import_module(f"{__name__}.{ALIASES.get(model_type, model_type)}"))


def check_known(config: Mapping[str, Any], within: str = "") -> str:
    """The model type of a config.json, if it has a file here; no model file is imported.

    CheckpointError otherwise: it says what a model is that writes no text, or lists the known types and what
    else may run the model.
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
