"""The interface between the pipeline and a target: writing weights, compiling programs, completing the
artifact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from nearfar.build.options import BuildOptions
from nearfar.build.program.compiled import Compiled
from nearfar.build.source import Source
from nearfar.build.weights.stream import WeightWriter
from nearfar.errors import BuildError
from nearfar.format.hashed import HashedFiles
from nearfar.format.kv import OF_TARGET
from nearfar.format.manifest import File, Program, Rope, Weights
from nearfar.kernels.contract import Products
from nearfar.kernels.quantized import StorableMatrices


@dataclass(frozen=True)
class KernelCounts:
    """Numbers of kernels of a target's programs: from the kernel cache, and compiled in this build."""

    kept: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class Programs:
    """A target's compiled programs, which do not depend on the weights' values, and where their kernels came
    from.
    """

    compiled: tuple[Compiled, ...] = ()
    kernels: KernelCounts = KernelCounts()


@dataclass(frozen=True)
class Made:
    """A target's part of its manifest.

    `tokenizer`: the files of the tokenizer, relative to the artifact; `config`, `function`: for mlx only;
    `bundled`: the artifact gets bundle files, because browsers load it file by file over a network.
    """

    ropes: dict[str, Rope]
    programs: tuple[Program, ...]
    tokenizer: list[Path]
    config: File | None = None
    function: File | None = None
    bundled: bool = False


class OverFiles:
    """The context of a weight writer: leaving it closes the open files."""

    def __init__(self, files: HashedFiles) -> None:
        self._open_files = files

    def __enter__(self) -> Self:
        self._open_files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.__exit__(kind, error, trace)


def check_kv_bits(name: str, options: BuildOptions) -> None:
    """Raise BuildError where a target has no programs for a requested KV cache."""
    able = OF_TARGET.get(name, (16,))
    if lacking := [str(bits) for bits in options.kv_bits if bits not in able]:
        raise BuildError(
            f"target {name} has no programs with a KV cache of {' or '.join(lacking)} bits, only of "
            f"{', '.join(map(str, able))}: leave {','.join(lacking)} out of --kv-bits, or build this "
            "target apart"
        )


Tell = Callable[[int, int], None]


class Target(Protocol):
    """A target. The pipeline calls check; then writer, for a thread that writes the weights, and at the same
    time compile; after both, finish.
    """

    @property
    def held(self) -> StorableMatrices:
        """The weights for which the target has kernels. Its source has no others (Source.held_by)."""
        ...

    def check(self, source: Source, options: BuildOptions) -> None:
        """Raise BuildError for what the target cannot do, before anything is written."""
        ...

    def products(self, options: BuildOptions) -> set[Products]:
        """The products with which the target's programs multiply the rows of a prompt."""
        ...

    def writer(self, source: Source, root: Path, options: BuildOptions) -> WeightWriter:
        """A writer of the weights into the artifact `root`, to be used as a context."""
        ...

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        """Compile the programs while the weights are written; nothing is written to the artifact. `tell` gets
        the number of compiled kernels and of all, 0 while that is unknown.
        """
        ...

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """Write all files but the weights and the manifest; `weights` is the manifest's section."""
        ...
