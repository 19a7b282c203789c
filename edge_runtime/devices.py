"""The kinds of devices that artifacts run on from Python, and how each is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nearfar.edge_runtime.artifact import Artifact
from nearfar.edge_runtime.manifest import Manifest, Program

if TYPE_CHECKING:
    from nearfar.edge_runtime.executors.base import Executor


@dataclass(frozen=True)
class Found:
    """What a device offers."""

    features: frozenset[str]
    limits: Mapping[str, int] = field(default_factory=dict)

    def max_pages(self, manifest: Manifest, program: Program) -> int | None:
        """Pages that fit in the largest buffer of the device; None where buffers have no limit of their own."""
        names = ("maxStorageBufferBindingSize", "maxBufferSize")
        sizes = [self.limits[name] for name in names if name in self.limits]
        model = manifest.model
        value = 2 if program.kv_dtype == "float16" else 4
        each = model.kv_heads * manifest.cache.page_size * model.head_dim * value
        return min(sizes) // each if sizes else None


@dataclass(frozen=True)
class Device:
    """One kind of device. `preferred`: whether to take it before others where an artifact for it is at hand."""

    probe: Callable[[], Found]
    open: Callable[[Artifact, Program, int, int, int | None], Executor]
    preferred: Callable[[], bool]
    pipelined: bool


def _probe_cpu() -> Found:
    from nearfar.edge_runtime.executors.cpu_features import KNOWN, architecture, cpu_flags

    # Where the features cannot be told, try: the build for the wrong CPU is the rarer case.
    return Found(cpu_flags() or frozenset(KNOWN.get(architecture(), ())))


def _open_cpu(artifact: Artifact, program: Program, pages: int, context: int, threads: int | None) -> Executor:
    from nearfar.edge_runtime.executors.cpu import CpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return CpuExecutor(artifact.path, artifact.data, raw, pages=pages, context=context, threads=threads)


def _probe_webgpu() -> Found:
    from nearfar.edge_runtime.executors import webgpu_device

    return Found(webgpu_device.features(), webgpu_device.limits())


def _open_webgpu(artifact: Artifact, program: Program, pages: int, context: int, threads: int | None) -> Executor:
    from nearfar.edge_runtime.executors.webgpu import WebGpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return WebGpuExecutor(artifact.path, artifact.data, raw, pages=pages, context=context)


def _prefer_webgpu() -> bool:
    from nearfar.edge_runtime.executors import webgpu_device

    return webgpu_device.is_hardware()


DEVICES = {
    "cpu": Device(_probe_cpu, _open_cpu, preferred=lambda: False, pipelined=False),
    "webgpu": Device(_probe_webgpu, _open_webgpu, preferred=_prefer_webgpu, pipelined=True),
}
"""By target, in order of preference where nothing speaks for one of them."""
