"""A target with plans over kernels of its own, as data: the pipeline builds its artifacts from this
record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nearfar.format import manifest
from nearfar.kernels.buckets import Buckets
from nearfar.kernels.contract import Packing, Variant
from nearfar.kernels.emission import Emit
from nearfar.kernels.quantized import Matrix, StorableMatrices


class VariantOptions(Protocol):
    """The options of a build that decide a target's variants."""

    @property
    def cpu(self) -> tuple[str, ...]:
        """Platforms: names of targets/cpu/platforms.py, or "host"."""
        ...

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """Vector units: names of targets/cpu/units.py, "baseline" or "native"; empty: the units that
        processors of an architecture differ in.
        """
        ...

    @property
    def kv_bits(self) -> tuple[int, ...]:
        """Bits of a value in the KV cache, one variant for each; 16 for floats."""
        ...


@dataclass(frozen=True)
class Planned:
    """A target with kernels: a program for each of its variants, over one set of weights.

    `packing`: the layout of matrices, which all variants share. `variants`: the variants for a build's
    options. `tvm_target`: the kind of code, as TVM names it. `emit`: writes a program's files.
    """

    name: str
    packing: Packing
    variants: Callable[[VariantOptions], tuple[Variant, ...]]
    tvm_target: dict[str, Any]
    emit: Emit
    int8_products: Callable[[Matrix], bool] = lambda matrix: False
    """Whether programs with int8 products multiply the matrix in int8, so that they round its inputs."""
    buckets: Buckets = field(default_factory=Buckets)
    """The rows that a step can have by default."""
    bundled: bool = False
    """Whether browsers load the artifact, file by file over a network, so that it needs bundle files."""
    held: StorableMatrices = field(default_factory=StorableMatrices.pairs)
    """The weights for which the target has kernels."""
    twin: Callable[[Path, manifest.Program], manifest.Program] | None = None
    """Makes the record of a second program from a program and its files; runtimes try the second
    one first.
    """
