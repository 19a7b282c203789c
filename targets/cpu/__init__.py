"""The CPU target: kernels in TIR, compiled by LLVM into one shared library with a small thread pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from nearfar.errors import BuildError
from nearfar.format.kv import Float
from nearfar.kernels.contract import Formula, Staged
from nearfar.kernels.jobs import (
    Attend,
    Conv,
    Delta,
    Embed,
    Experts,
    Greedy,
    Job,
    Linear,
    Logprobs,
    Norm,
    Project,
    RopeAppend,
    Route,
    Rows,
    Sample,
    Split,
    Ssm,
)
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import (
    attention,
    conv,
    delta,
    embed,
    experts,
    greedy,
    linear,
    norm,
    paged,
    rope,
    route,
    sample,
    ssm,
)
from nearfar.targets.cpu.units import Unit

__all__ = ["CpuKernels"]

STAGES: dict[type[Job], Callable[[Any, Unit], Staged]] = {
    Embed: embed.embed,
    Norm: norm.norm,
    Linear: linear.linear,
    RopeAppend: rope.rope_append,
    Attend: attention.attention,
    Conv: conv.conv,
    Delta: delta.delta,
    Ssm: ssm.ssm,
    Route: route.route,
    Experts: experts.experts,
    Greedy: greedy.greedy,
    Sample: sample.sample,
    Logprobs: greedy.logprobs,
}
"""The kernels of each job."""
NOT_ASKED = (Project, Rows)
"""Jobs that CpuKernels never gets, because its `projects` is false."""


@lru_cache(maxsize=1024)
def _made(job: Job, unit: Unit) -> Staged:
    """The launches of a job, cached: models share many jobs, above all the sampler's."""
    return STAGES[type(job)](job, unit)


class CpuKernels:
    """nearfar.kernels.contract.Kernels for CPUs with a vector unit; float32 activations throughout."""

    activations: Float = "float32"
    formulas: Mapping[str, Formula] = MappingProxyType({})
    parts = staticmethod(packing.parts)
    pack = staticmethod(packing.pack)
    bundles = staticmethod(packing.bundles)

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def projects(self, job: Project) -> bool:
        """False for every job: a launch on the CPU costs little."""
        return False

    def check(self, job: Job) -> None:
        """BuildError if no kernel takes the job: by its type, then by its shapes and dtypes."""
        if type(job) not in STAGES:
            raise BuildError(f"the cpu target has no kernel for a job of type {type(job).__name__}")
        if isinstance(job, RopeAppend | Attend):
            paged.check(job)

    def stages(self, job: Job) -> Staged:
        """The launches of a job, from the function for its type."""
        self.check(job)
        return _made(job, self.unit)

    def split(self, attend: Attend, linear: Linear) -> Split | None:
        """None: attention is one launch on the CPU."""
        return None
