"""Kernels and weight layout that the GPU targets share: float32 and float16 over one set of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from nearfar.errors import BuildError
from nearfar.format.manifest import Float
from nearfar.targets.bundles import bundles
from nearfar.targets.jobs import (
    Attend,
    Embed,
    Greedy,
    Job,
    Linear,
    Logprobs,
    Norm,
    Project,
    RopeAppend,
    Rows,
    Sample,
    Split,
)
from nearfar.targets.kernels import Precision, Staged, Variant

from . import packing
from .classes import CLASSES, SOFTWARE, DeviceClass, Tuning
from .kernels.attention import attention, split
from .kernels.embed import embed
from .kernels.greedy import greedy
from .kernels.linear import linear
from .kernels.logprobs import logprobs
from .kernels.norm import norm
from .kernels.project import project, projects
from .kernels.rope import rope_append
from .kernels.rows import rows
from .kernels.sample import sample


class GpuKernels:
    """See nearfar.targets.kernels.Kernels."""

    parts = staticmethod(packing.parts)
    pack = staticmethod(packing.pack)
    bundles = staticmethod(bundles)

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        # Kernels of class software look at the dtypes of their job only: both precisions share them.
        self._shaping = replace(tuning, half=False) if tuning.device is SOFTWARE else tuning

    @property
    def activations(self) -> Float:
        """float16 in f16 programs, but for the residual stream."""
        return "float16" if self.tuning.half else "float32"

    def projects(self, job: Project) -> bool:
        """Whether there is one kernel for the job."""
        return projects(job, self.tuning)

    def stages(self, job: Job) -> Staged:
        """The launches of a job."""
        return _made(job, self._shaping if type(job) in _SHAPED else None)

    def split(self, attend: Attend, linear: Linear) -> Split | None:
        """Where it costs less than the launch that it spares."""
        return split(attend, linear, self.tuning)


_SHAPED: dict[type[Job], Callable[[Any, Tuning], Staged]] = {
    Linear: linear, Project: project, Attend: attention,
}  # fmt: skip
"""Kernels that differ by what a program is made for."""
_PLAIN: dict[type[Job], Callable[[Any], Staged]] = {
    Embed: embed, Norm: norm, RopeAppend: rope_append, Rows: rows, Greedy: greedy, Sample: sample,
    Logprobs: logprobs,
}  # fmt: skip
"""Kernels that all programs share."""


@lru_cache(maxsize=1024)
def _made(job: Job, tuning: Tuning | None) -> Staged:
    """Parsing its script is most of what a kernel takes: what asks for the same shares it."""
    if tuning is not None:
        return _SHAPED[type(job)](job, tuning)
    maker = _PLAIN.get(type(job))
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
