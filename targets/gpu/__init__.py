"""Kernels and weight layout that the GPU targets share: float32 and float16 over one set of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from nearfar.errors import BuildError
from nearfar.format.manifest import Float
from nearfar.targets.jobs import Attend, Embed, Greedy, Job, Linear, Logprobs, Norm, RopeAppend, Sample
from nearfar.targets.kernels import Kernels, Precision, Staged

from . import packing
from .kernels.attention import attention
from .kernels.embed import embed
from .kernels.greedy import greedy
from .kernels.linear import linear
from .kernels.logprobs import logprobs
from .kernels.norm import norm
from .kernels.rope import rope_append
from .kernels.sample import sample


class GpuKernels:
    """See nearfar.targets.kernels.Kernels."""

    precisions: tuple[Precision, ...] = ("f16", "f32")
    parts = staticmethod(packing.parts)
    pack = staticmethod(packing.pack)

    def __init__(self, *, vectors: bool = False) -> None:
        """`vectors`: for a target that loads four neighbours at once."""
        self._vectors = vectors

    def activation_dtype(self, precision: Precision) -> Float:
        """float16 in f16 programs, but for the residual stream."""
        return "float16" if precision == "f16" else "float32"

    def stages(self, job: Job) -> Staged:
        """The launches of a job."""
        if isinstance(job, Linear):
            return _linear(job, self._vectors)
        return _made(job)


_MAKERS: dict[type[Job], Callable[[Any], Staged]] = {
    Embed: embed, Norm: norm, RopeAppend: rope_append, Attend: attention, Greedy: greedy, Sample: sample,
    Logprobs: logprobs,
}  # fmt: skip

# Parsing its script is most of what a kernel takes: targets and precisions that ask for the same share it.
_linear = lru_cache(maxsize=512)(linear)


@lru_cache(maxsize=512)
def _made(job: Job) -> Staged:
    maker = _MAKERS.get(type(job))
    if maker is None:
        raise BuildError(f"the GPU targets have no kernel for {job}")
    return maker(job)


KERNELS: Kernels = GpuKernels()

__all__ = ["KERNELS", "GpuKernels"]
