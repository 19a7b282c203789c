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
class Settings:
    """What an executor is opened with: pages of the cache, positions of a sequence, CPU threads, bits of the cache."""

    pages: int
    context: int
    threads: int | None = None
    kv_bits: int | None = None


@dataclass(frozen=True)
class Device:
    """One kind of device. `preferred`: how much to take it before others where artifacts for both are at hand; 0: not."""

    probe: Callable[[], Found]
    open: Callable[[Artifact, Program, Settings], Executor]
    preferred: Callable[[], int]
    pipelined: bool
    kv_bits: tuple[int, ...] = ()
    """How it can quantize its cache."""


def _probe_cpu() -> Found:
    from nearfar.edge_runtime.executors.cpu_features import KNOWN, architecture, cpu_flags

    # Where the features cannot be told, try: the build for the wrong CPU is the rarer case.
    return Found(cpu_flags() or frozenset(KNOWN.get(architecture(), ())))


def _open_cpu(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.cpu import CpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return CpuExecutor(
        artifact.path, artifact.data, raw, pages=settings.pages, context=settings.context, threads=settings.threads
    )


def _probe_webgpu() -> Found:
    from nearfar.edge_runtime.executors import webgpu_device

    return Found(webgpu_device.features(), webgpu_device.limits())


def _open_webgpu(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.webgpu import WebGpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return WebGpuExecutor(artifact.path, artifact.data, raw, pages=settings.pages, context=settings.context)


def _prefer_webgpu() -> int:
    from nearfar.edge_runtime.executors import webgpu_device

    return int(webgpu_device.is_hardware())


def _probe_mlx() -> Found:
    from nearfar.edge_runtime.executors.mlx import device

    return Found(device.features(), device.limits())


def _open_mlx(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.mlx.executor import MlxExecutor

    return MlxExecutor(artifact, program, pages=settings.pages, kv_bits=settings.kv_bits)


def _prefer_mlx() -> int:
    from nearfar.edge_runtime.executors.mlx import device

    return 2 if device.installed() and device.has_metal() else 0


DEVICES = {
    "cpu": Device(_probe_cpu, _open_cpu, preferred=lambda: 0, pipelined=False),
    "webgpu": Device(_probe_webgpu, _open_webgpu, preferred=_prefer_webgpu, pipelined=True),
    "mlx": Device(_probe_mlx, _open_mlx, preferred=_prefer_mlx, pipelined=True, kv_bits=(8, 4)),
}
"""By target, in order of preference where nothing speaks for one of them."""
