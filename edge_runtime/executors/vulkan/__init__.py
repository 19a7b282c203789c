"""A GPU, or a software GPU, through Vulkan's own interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearfar.edge_runtime.devices import Device, ListedDevice, Settings
from nearfar.edge_runtime.found import Found
from nearfar.errors import DeviceError
from nearfar.format.adapters import class_of

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.base import Executor
    from nearfar.format.manifest import Program


def _probe(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.vulkan.device import free_memory, gpus, select
    from nearfar.memory import host_memory

    gpu = select(which, gpus())
    free = free_memory(gpu)
    return Found(
        gpu.features,
        gpu.limits,
        min(free, host_memory().available) if gpu.shared else free,
        gpu.adapter,
    )


def _open(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.vulkan.executor import VulkanExecutor

    return VulkanExecutor(artifact, program, settings)


def _beside(main: Executor, artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.vulkan.executor import VulkanExecutor

    assert isinstance(main, VulkanExecutor)
    return VulkanExecutor(artifact, program, settings, beside=main)


def _preferred() -> int:
    """Device preference: before webgpu if there is a GPU; for a software GPU, or none, only before mlx and an
    uninstalled onnx.
    """
    from nearfar.edge_runtime.executors.vulkan.device import gpus

    try:
        return 2 if gpus()[0].kind in ("discrete", "integrated", "virtual") else -2
    except DeviceError:
        return -2


def _list() -> Sequence[ListedDevice]:
    from nearfar.edge_runtime.executors.vulkan.device import gpus

    return [
        ListedDevice(
            f"vulkan:{gpu.index}", gpu.name, gpu.kind, f"{gpu.driver}, Vulkan {gpu.version}",
            tuple(sorted(gpu.features)), gpu.memory, gpu.limits, class_of(gpu.adapter),
        )
        for gpu in gpus()
    ]  # fmt: skip


DEVICE = Device(_probe, _open, _preferred, _list, _beside, several=True, debug=True)
