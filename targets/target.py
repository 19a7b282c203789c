"""What the pipeline asks of a target: how its weights are written, and what it makes of the model besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nearfar.build.program.compile import Model
from nearfar.build.source import BuildOptions, Source
from nearfar.build.weights.stream import WeightWriter


@dataclass(frozen=True)
class Made:
    """What a target adds to its manifest.

    `model`: what the manifest describes (its context can be shorter than the checkpoint's); `tokenizer`: the files of the
    tokenizer, relative to the artifact; `extra`: further keys of the manifest.
    """

    model: Model
    rope: dict[str, Any]
    programs: list[dict[str, Any]]
    tokenizer: list[Path]
    extra: dict[str, Any]


class Target(Protocol):
    """One target. The pipeline calls check, writer, and, when the weights are written, finish."""

    def check(self, source: Source, options: BuildOptions) -> None:
        """Refuse what the target cannot do, before anything is written: BuildError."""
        ...

    def writer(self, source: Source, root: Path) -> WeightWriter:
        """Where the weights go."""
        ...

    def finish(self, source: Source, root: Path, weights: dict[str, Any], options: BuildOptions) -> Made:
        """Compile, and write what lies beside the weights; `weights` is the manifest's section."""
        ...
