"""Model architectures, one file each, found by the config's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from nearfar.errors import CheckpointError
from nearfar.step.causal import others_for
from nearfar.step.config import ConfigReader
from nearfar.step.kinds import writes_no_text
from nearfar.suggestions import suggested

if TYPE_CHECKING:
    from nearfar.step.model import Model

ALIASES: Mapping[str, str] = {
    "iquestcoder": "llama",
    "ministral": "mistral",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Model types that are computed like another type; defaults for absent keys are those of their own class."""

NESTED: Mapping[str, str] = {
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "vipllava": "llama",
}
"""Model types whose text model is in `text_config`, each with the type of that text model if the config does
not name it.

A type is listed only if its text model computes the same inside the whole as on its own.
"""
RENAMED: Mapping[str, str] = {
    "exaone4_5_text": "exaone4", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
}  # fmt: skip
"""Names that published files give to a text model, for transformers' names."""


def text_type(whole: str, text: Mapping[str, Any]) -> str:
    """The type of the text model in `text`, the text_config of a model of type `whole`."""
    named = text.get("model_type") or NESTED[whole]
    return RENAMED.get(named, named) if isinstance(named, str) else str(named)


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
        close = suggested(model_type, known) if isinstance(model_type, str) else ""
        raise CheckpointError(
            f"config.json: {told}{close}; nearfar can build: {', '.join(known)}. {others_for(config)}"
        )
    return model_type
