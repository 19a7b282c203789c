"""How a model wants its tokens drawn where a request does not say."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SamplingDefaults:
    """What the manifest's `sampling` says; None: nothing. Names, ranges and meanings are those of
    SamplingParams.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """What it says, by parameter."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def told(self) -> str:
        """The defaults as a line for a person."""
        said = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return f"{said} (the checkpoint says nothing)" if self == UNSAID else said or "as OpenAI's"


NAMES = tuple(field.name for field in fields(SamplingDefaults))
NOTHING = SamplingDefaults()
UNSAID = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""What a model gets whose checkpoint says nothing of sampling at all: llama.cpp's defaults. OpenAI's, which
draw from the whole vocabulary at temperature 1, suit large models: SmolLM2-135M's files say nothing, and its
answers were word salad after a sentence.
"""
