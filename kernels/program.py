"""A compiled program between the build and a target: kernels as TIR, and plans that launch them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nearfar.format.kv import Float, KvDtype
from nearfar.kernels.contract import Variant

if TYPE_CHECKING:
    from tvm import tirx


@dataclass(frozen=True)
class Precisions:
    """Dtypes of a program: of its activations (the residual stream is always float32) and of its cache."""

    activations: Float
    kv: KvDtype


@dataclass(frozen=True)
class LoweredLaunch:
    """One kernel and its arguments, each as `space:name` (docs/artifact.md, Plans)."""

    kernel: str
    args: tuple[str, ...]


@dataclass
class LoweredPlan:
    """One function for one bucket.

    `storage`: the bytes of each workspace buffer that it uses, before sharing; `tensors`: the number of
    tensors that each buffer holds, one after the other.
    """

    function: str
    size: int
    rows: int
    launches: list[LoweredLaunch] = field(default_factory=list)
    storage: list[int] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweredProgram:
    """Plans in the order of the manifest, the kernels they launch, and the bytes of the shared workspace."""

    variant: Variant
    dtypes: Precisions
    plans: list[LoweredPlan]
    kernels: dict[str, tirx.PrimFunc]
    workspace: list[int]

    @property
    def name(self) -> str:
        """The variant's name, unique in the artifact."""
        return self.variant.name
