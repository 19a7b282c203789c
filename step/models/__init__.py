"""Model architectures, one file each, found by the config's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nearfar.errors import CheckpointError
from nearfar.step.config import ModelConfig
from nearfar.step.models import llama, mistral, qwen3
from nearfar.step.params import Param

if TYPE_CHECKING:
    from nearfar.build.program.graph import StepGraph


class Architecture(Protocol):
    """What a file in this folder provides."""

    def parse(self, config: Mapping[str, Any]) -> ModelConfig:
        """Read config.json; CheckpointError where a value is unsupported."""
        ...

    def params(self, config: ModelConfig) -> list[Param]:
        """All weights in plan order, with the checkpoint tensors each is made of."""
        ...

    def step(self, graph: StepGraph, config: ModelConfig) -> None:
        """Emit the step function: tokens in, logits out."""
        ...


ARCHITECTURES: dict[str, Architecture] = {"llama": llama, "mistral": mistral, "qwen3": qwen3}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json, or CheckpointError naming the known ones."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"config.json: model_type is {model_type!r}; nearfar can build: {known}")
    return ARCHITECTURES[model_type]
