"""Any GPU, through wgpu-py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearfar.edge_runtime.devices import Device, ListedDevice, Settings
from nearfar.edge_runtime.found import Found
from nearfar.format.adapters import class_of

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.base import Executor
    from nearfar.format.manifest import Program


def _probe(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.webgpu import device

    return Found(device.features(), device.limits(), adapter=device.described())


def _open(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.webgpu.executor import WebGpuExecutor

    return WebGpuExecutor(artifact, program, settings)


def _beside(main: Executor, artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.webgpu.executor import WebGpuExecutor

    assert isinstance(main, WebGpuExecutor)
    return WebGpuExecutor(artifact, program, settings, beside=main)


def _preferred() -> int:
    """Device preference: after vulkan, since WebGPU is a layer over its driver on most systems."""
    from nearfar.edge_runtime.executors.webgpu import device

    return 1 if device.is_hardware() else -1


def _list() -> Sequence[ListedDevice]:
    from nearfar.edge_runtime.executors.webgpu import device

    info, found = device.information(), _probe()
    driver = f"{info.get('backend_type', '')} {info.get('description', '')}".strip()
    features = tuple(
        sorted(name for name in found.features if name.startswith(("shader-", "subgroup")))
    )  # only the compute API is needed, not graphics
    kind = info.get("adapter_type", "").lower()
    own = class_of(device.described())
    return [ListedDevice("webgpu", info.get("device", ""), kind, driver, features, 0, found.limits, own)]


DEVICE = Device(_probe, _open, _preferred, _list, _beside)
