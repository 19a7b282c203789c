"""A target with plans over kernels of ours, as data: what the pipeline builds its artifacts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nearfar.format import manifest
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Packing, Variant
from nearfar.kernels.emission import Emit
from nearfar.kernels.quantized import GROUPS, Matrix


class Asked(Protocol):
    """What of a build's options decides the variants of a target."""

    @property
    def cpu(self) -> tuple[str, ...]:
        """Platforms: names of targets/cpu/platforms.py, or "host"."""
        ...

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """Vector units: names of targets/cpu/units.py, "baseline" or "native"; none: those that an
        architecture's processors differ in.
        """
        ...

    @property
    def kv_bits(self) -> tuple[int, ...]:
        """Bits of a value in the KV cache, a variant each; 16 for floats."""
        ...


@dataclass(frozen=True)
class Planned:
    """A target with kernels: a program for each of its variants, over one set of weights.

    `packing`: how matrices are laid out; all variants read the same weights. `variants`: those that there are
    for what was asked for. `tvm_target`: the kind of code, as TVM names it. `emit`: writes a program's files.
    """

    name: str
    packing: Packing
    variants: Callable[[Asked], tuple[Variant, ...]]
    tvm_target: dict[str, Any]
    emit: Emit
    rounds: Callable[[Matrix], bool] = lambda matrix: False
    """Whether programs with products of int8 round the rows that a matrix is multiplied by."""
    buckets: Buckets = field(default_factory=Buckets)
    """Rows that a step can have, where nothing else was asked for."""
    packed: bool = False
    """Whether browsers load the artifact, file by file over a network, so that it has packs."""
    groups: tuple[int, ...] = GROUPS
    """Sizes of groups of weights that there are kernels for."""
    twin: Callable[[Path, manifest.Program], manifest.Program] | None = None
    """The record of a second program over the files of a program, which runtimes try before that one."""
