"""The kinds of devices that artifacts run on from Python, and how each is opened."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import DeviceError, RequestError
from nearfar.format.manifest import Program

if TYPE_CHECKING:
    from nearfar.edge_runtime.executors.base import Executor


@dataclass(frozen=True)
class Found:
    """What a device offers. `memory`: bytes that may be taken, where it is not simply the host's."""

    features: frozenset[str]
    limits: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None

    def largest_buffer(self) -> int | None:
        """Bytes of the largest buffer of the device; None where buffers have no limit of their own."""
        names = ("maxStorageBufferBindingSize", "maxBufferSize", "maxStorageBufferRange")
        sizes = [self.limits[name] for name in names if name in self.limits]
        return min(sizes, default=None)


@dataclass(frozen=True)
class Settings:
    """What an executor is opened with: pages of the cache by group, positions of a sequence, CPU threads, bits of the cache.

    `which`: the device of its kind, by number or name; `debug`: checked by the driver's validation layer.
    """

    pages: tuple[int, ...]
    context: int
    threads: int | None = None
    kv_bits: int | None = None
    which: str | None = None
    debug: bool = False


@dataclass(frozen=True)
class Listed:
    """A device as `nearfar devices` shows it. `id`: what --device takes; `memory`: bytes in all, 0 where that is not known."""

    id: str
    name: str
    kind: str
    driver: str
    features: tuple[str, ...]
    memory: int
    limits: Mapping[str, int]


class Probe(Protocol):
    """Finds out what a device offers; DeviceError where there is none. `which`: see Settings."""

    def __call__(self, which: str | None = None) -> Found:
        """Ask the driver."""
        ...


@dataclass(frozen=True)
class Device:
    """One kind of device. `preferred`: how much to take it before others where artifacts for both are at hand; 0: not.

    `several`: there can be more than one, told apart by `which`.
    """

    probe: Probe
    open: Callable[[Artifact, Program, Settings], Executor]
    preferred: Callable[[], int]
    pipelined: bool
    list: Callable[[], Sequence[Listed]]
    kv_bits: tuple[int, ...] = ()
    """How it can quantize its cache."""
    several: bool = False


def _probe_cpu(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.cpu.features import KNOWN, architecture, cpu_flags

    # Where the features cannot be told, try: the build for the wrong CPU is the rarer case.
    return Found(cpu_flags() or frozenset(KNOWN.get(architecture(), ())))


def _open_cpu(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.cpu.executor import CpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return CpuExecutor(
        artifact.path, artifact.data, raw, pages=settings.pages, context=settings.context, threads=settings.threads
    )


def _probe_webgpu(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.webgpu import device as webgpu_device

    return Found(webgpu_device.features(), webgpu_device.limits())


def _open_webgpu(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.webgpu.executor import WebGpuExecutor

    raw = artifact.data["programs"][artifact.manifest.programs.index(program)]
    return WebGpuExecutor(artifact.path, artifact.data, raw, pages=settings.pages, context=settings.context)


def _prefer_webgpu() -> int:
    from nearfar.edge_runtime.executors.webgpu import device as webgpu_device

    return int(webgpu_device.is_hardware())


def _probe_mlx(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.mlx import device

    return Found(device.features(), device.limits())


def _open_mlx(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.mlx.executor import MlxExecutor

    return MlxExecutor(artifact, program, pages=settings.pages, kv_bits=settings.kv_bits)


def _prefer_mlx() -> int:
    from nearfar.edge_runtime.executors.mlx import device

    return 3 if device.installed() and device.has_metal() else 0


def _list_cpu() -> list[Listed]:
    import psutil

    from nearfar.edge_runtime.executors.cpu.features import architecture

    name = platform.processor() or architecture()
    memory = int(psutil.virtual_memory().total)
    limits = {"cores": psutil.cpu_count(logical=False) or 1, "threads": psutil.cpu_count() or 1}
    return [Listed("cpu", name, "cpu", architecture(), tuple(sorted(_probe_cpu().features)), memory, limits)]


def _list_webgpu() -> list[Listed]:
    from nearfar.edge_runtime.executors.webgpu import device as webgpu_device

    info, found = webgpu_device.information(), _probe_webgpu()
    kind, driver = info.get("adapter_type", ""), f"{info.get('backend_type', '')} {info.get('description', '')}".strip()
    features = tuple(sorted(name for name in found.features if name.startswith(("shader-", "subgroup"))))  # not the graphics
    return [Listed("webgpu", info.get("device", ""), kind.lower(), driver, features, 0, found.limits)]


def _list_mlx() -> list[Listed]:
    from importlib.metadata import version

    from nearfar.edge_runtime.executors.mlx import device

    metal = device.has_metal()
    name, memory = device.describe()
    return [Listed("mlx", name, "gpu" if metal else "cpu", f"MLX {version('mlx')}", tuple(device.features()), memory, device.limits())]


def _list_vulkan() -> list[Listed]:
    from nearfar.edge_runtime.executors.vulkan.device import gpus

    return [
        Listed(f"vulkan:{g.index}", g.name, g.kind, f"{g.driver}, Vulkan {g.version}", tuple(sorted(g.features)), g.memory, g.limits)
        for g in gpus()
    ]


def _probe_vulkan(which: str | None = None) -> Found:
    import psutil

    from nearfar.edge_runtime.executors.vulkan.device import free_memory, gpus, select

    gpu = select(which, gpus())
    free = free_memory(gpu)
    return Found(gpu.features, gpu.limits, min(free, psutil.virtual_memory().available) if gpu.shared else free)


def _open_vulkan(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.vulkan.device import gpus, select
    from nearfar.edge_runtime.executors.vulkan.executor import VulkanExecutor

    gpu = select(settings.which, gpus(settings.debug))
    return VulkanExecutor(gpu, artifact, program, pages=settings.pages, context=settings.context)


def _prefer_vulkan() -> int:
    """Before webgpu, which on most systems is a layer over the same driver."""
    from nearfar.edge_runtime.executors.vulkan.device import gpus

    try:
        return 2 if gpus()[0].kind in ("discrete", "integrated", "virtual") else 0
    except DeviceError:
        return 0


DEVICES = {
    "cpu": Device(_probe_cpu, _open_cpu, preferred=lambda: 0, pipelined=False, list=_list_cpu),
    "webgpu": Device(_probe_webgpu, _open_webgpu, preferred=_prefer_webgpu, pipelined=True, list=_list_webgpu),
    "vulkan": Device(
        _probe_vulkan, _open_vulkan, preferred=_prefer_vulkan, pipelined=True, list=_list_vulkan, several=True
    ),
    "mlx": Device(_probe_mlx, _open_mlx, preferred=_prefer_mlx, pipelined=True, list=_list_mlx, kv_bits=(8, 4)),
}
"""By target, in order of preference where nothing speaks for one of them."""


def parse_device(device: str) -> tuple[str, str | None]:
    """What --device means: "auto" or a target, and which of its devices ("vulkan:1", "vulkan:radeon"). RequestError for others."""
    target, _, which = device.partition(":")
    if target not in ("auto", *DEVICES):
        raise RequestError(f"device must be auto, {' or '.join(DEVICES)}, not {device!r}", "device")
    if ":" in device and (target == "auto" or not DEVICES[target].several):
        able = ", ".join(name for name, kind in DEVICES.items() if kind.several)
        raise RequestError(f"only {able} can name one of several devices, not {device!r}", "device")
    if ":" in device and not which:
        raise RequestError(f"{device!r} names no device after the colon: {target}:0, or a part of a name", "device")
    return target, which or None
