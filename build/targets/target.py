"""What the pipeline asks of a target: how its weights are written, and what it makes of the model besides."""

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


@dataclass(frozen=True)
class KernelCounts:
    """Kernels of a target's programs: kept from an earlier build, and compiled in this one."""

    kept: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class Programs:
    """What a target has compiled, which the values of the weights have no part in; where it came from."""

    compiled: tuple[Compiled, ...] = ()
    kernels: KernelCounts = KernelCounts()


@dataclass(frozen=True)
class Made:
    """What a target adds to its manifest.

    `tokenizer`: the files of the tokenizer, relative to the artifact; `config`, `function`: mlx's own;
    `packed`: browsers load it, file by file over a network, so that it has packs.
    """

    ropes: dict[str, Rope]
    programs: tuple[Program, ...]
    tokenizer: list[Path]
    config: File | None = None
    function: File | None = None
    packed: bool = False


class OverFiles:
    """What the context of a weight writer does: its end closes the files that are open."""

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
    """BuildError where a target has no programs with a cache that is asked for."""
    able = OF_TARGET.get(name, (16,))
    if lacking := [str(bits) for bits in options.kv_bits if bits not in able]:
        raise BuildError(
            f"target {name} has no programs with a KV cache of {' or '.join(lacking)} bits, only of "
            f"{', '.join(map(str, able))}: leave {','.join(lacking)} out of --kv-bits, or build this "
            "target apart"
        )


Tell = Callable[[int, int], None]


class Target(Protocol):
    """One target. The pipeline calls check; then writer, for a thread that writes the weights, and compile
    meanwhile; when both are done, finish.
    """

    @property
    def groups(self) -> tuple[int, ...]:
        """The sizes of groups of weights that it has kernels for, of those that there are. The source that it
        is given has no others (Source.held_by).
        """
        ...

    def check(self, source: Source, options: BuildOptions) -> None:
        """Refuse what the target cannot do, before anything is written: BuildError."""
        ...

    def products(self, options: BuildOptions) -> set[Products]:
        """What the programs that it makes multiply a prompt's rows as."""
        ...

    def writer(self, source: Source, root: Path, options: BuildOptions) -> WeightWriter:
        """Where the weights go."""
        ...

    def compile(self, source: Source, options: BuildOptions, tell: Tell) -> Programs:
        """The programs, while the weights are written; nothing is written to the artifact. `tell`: how many
        of their kernels are made, of how many; 0 where that is not known yet.
        """
        ...

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """Write what lies beside the weights; `weights` is the manifest's section."""
        ...
