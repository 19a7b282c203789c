"""Kernels and weight layout that the GPU targets share: float32 and float16 over one set of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from nearfar.errors import BuildError
from nearfar.format.manifest import Float
from nearfar.targets.jobs import Attend, Embed, Greedy, Job, Linear, Logprobs, Norm, RopeAppend, Sample
from nearfar.targets.kernels import Precision, Staged, Variant

from . import packing
from .classes import CLASSES, DeviceClass, Tuning
from .kernels.attention import attention
from .kernels.embed import embed
from .kernels.greedy import greedy
from .kernels.linear import linear
from .kernels.logprobs import logprobs
from .kernels.norm import norm
from .kernels.rope import rope_append
from .kernels.sample import sample

Maker = Callable[[Any], Staged]
_MAKERS: dict[type[Job], Maker] = {
    Embed: embed, Norm: norm, RopeAppend: rope_append, Attend: attention, Greedy: greedy, Sample: sample,
    Logprobs: logprobs,
}  # fmt: skip
_SHARED: dict[type[Job], Maker] = {job: lru_cache(256)(maker) for job, maker in _MAKERS.items()}
"""Kernels that are the same in every program: making one takes longer than all that is done with it."""


class GpuKernels:
    """See nearfar.targets.kernels.Kernels."""

    parts = staticmethod(packing.parts)
    pack = staticmethod(packing.pack)

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._makers: dict[type[Job], Maker] = _SHARED | {Linear: partial(linear, tuning=tuning)}

    @property
    def activations(self) -> Float:
        """float16 in f16 programs, but for the residual stream."""
        return "float16" if self.tuning.half else "float32"

    def stages(self, job: Job) -> Staged:
        """The launches of a job."""
        maker = self._makers.get(type(job))
        if maker is None:
            raise BuildError(f"the GPU targets have no kernel for {job}")
        return maker(job)


def variants(*, vectors: bool = False) -> tuple[Variant, ...]:
    """The programs of a GPU target: for each class, the first that a device can run before the others."""
    precisions: tuple[Precision, ...] = ("f16", "f32")
    return tuple(variant(each, precision, vectors) for each in CLASSES.values() for precision in precisions)


def variant(device: DeviceClass, precision: Precision, vectors: bool) -> Variant:
    """A program for a class of devices."""
    kernels = GpuKernels(Tuning(device, half=precision == "f16", vectors=vectors))
    return Variant(f"{device.name}-{precision}", precision, kernels, device.name)


__all__ = ["GpuKernels", "variant", "variants"]
