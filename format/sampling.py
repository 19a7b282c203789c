"""The sampling parameters that a model wants if a request states none."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SamplingDefaults:
    """The content of the manifest's `sampling`; None: it states nothing. Names, ranges and meanings are those
    of SamplingParams.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The parameters that are stated, by name."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def told(self) -> str:
        """The defaults as a line for a person."""
        said = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return f"{said} (the checkpoint says nothing)" if self == UNSAID else said or "as OpenAI's"


@dataclass(frozen=True)
class Range:
    """The values that a parameter may have; `above`: not `least` itself."""

    least: float
    most: float
    above: bool = False


RANGES = {
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, above=True),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, above=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
}
"""The parameters of a request that are fractions. web/src/worker/engine/sampling.ts has the same ranges;
tests/vectors/requests holds them in both languages.
"""
NAMES = tuple(field.name for field in fields(SamplingDefaults))
NOTHING = SamplingDefaults()
UNSAID = SamplingDefaults(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
"""Sampling parameters of a model whose checkpoint states none: llama.cpp's defaults.

OpenAI's draw from the whole vocabulary at temperature 1, which suits large models. SmolLM2-135M's files state
none, and with OpenAI's defaults its answers were word salad after a sentence.
"""
