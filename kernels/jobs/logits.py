"""Jobs of the sampler: tokens drawn from rows of logits, and their log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OverLogits:
    """The fields of all jobs over logits: the number of rows, and the length of a row."""

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
    """Log probabilities of the sampled token and of the 20 likeliest tokens (docs/artifact.md, logprobs)."""

    kind: ClassVar = "logprobs"
