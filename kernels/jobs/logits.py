"""Jobs beside the step: what is drawn from rows of logits, and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OverLogits:
    """What jobs over rows of logits share: how many rows there are, and how long a row is."""

    kind: ClassVar[str]
    rows: int
    vocab: int

    @property
    def label(self) -> str:
        """Name of the kernel."""
        return f"{self.kind}_r{self.rows}_{self.vocab}"


@dataclass(frozen=True)
class Greedy(OverLogits):
    """sampled[i] = the best token of logits row i (docs/artifact.md, greedy)."""

    kind: ClassVar = "greedy"


@dataclass(frozen=True)
class Sample(OverLogits):
    """sampled[i] = a token drawn from logits row i (docs/artifact.md, sample)."""

    kind: ClassVar = "sample"
    slots: int


@dataclass(frozen=True)
class Logprobs(OverLogits):
    """Log probabilities of the sampled token and of the 20 likeliest (docs/artifact.md, logprobs)."""

    kind: ClassVar = "logprobs"
