"""The record of a tiny config of a model type, and the functions that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

VOCAB = 261  # the size of the byte tokenizer's vocabulary


@dataclass(frozen=True)
class Case:
    """A tiny config. `window`: the shortest of its windows, so that a prompt can be longer."""

    model_type: str
    name: str
    config: Mapping[str, Any] = field(hash=False)
    window: int | None = None
    context: int | None = None
    """The context length that the build is asked for, in tokens; None for the model's own."""
    prompts: tuple[int, ...] = (9, 45)
    """Lengths of the prompts in tokens: below and beyond every window (and beyond the original context of a
    stretched rope).
    """

    @property
    def experts(self) -> bool:
        """Whether some layers have experts, which not every target supports."""
        text = self.config.get("text_config", self.config)
        return any("experts" in key and value for key, value in text.items())

    def __str__(self) -> str:
        return f"{self.model_type}-{self.name}"


OWN = object()

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 0,
}


def case(
    model_type: str,
    name: str,
    *,
    context: int | None = None,
    prompts: tuple[int, ...] = (9, 45),
    **config: Any,
) -> Case:
    """Make a case from BASE and the given fields; a key that is OWN keeps the class's default."""
    merged = {key: value for key, value in {**BASE, **config}.items() if value is not OWN}
    windows = [merged[key] for key in ("sliding_window",) if isinstance(merged.get(key), int)]
    return Case(model_type, name, merged, min(windows, default=None), context, prompts)


def inside(model_type: str, inner: Case, vision: Mapping[str, Any], **config: Any) -> Case:
    """Make a multimodal model whose text model is that of another case."""
    text = {**inner.config, "model_type": inner.model_type}
    return replace(
        inner,
        model_type=model_type,
        name=f"with-{inner}",
        config={"text_config": text, "vision_config": vision, **config},
    )


LOCAL, GLOBAL = "sliding_attention", "full_attention"

MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.11, "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}  # fmt: skip
