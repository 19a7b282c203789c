"""MLX: Apple's GPUs or the CPU. Each step builds a graph; there are no plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearfar.edge_runtime.devices import Device, ListedDevice, Settings
from nearfar.edge_runtime.found import Found

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.base import Executor
    from nearfar.format.manifest import Program


def _probe(which: str | None = None) -> Found:
    from nearfar.edge_runtime.executors.mlx import device

    return Found(device.features(), device.limits())


def _open(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.mlx.executor import MlxExecutor

    return MlxExecutor(
        artifact, program, pages=settings.pages, context=settings.context, kv_bits=settings.kv_bits
    )


def _preferred() -> int:
    """Device preference: the highest if there is an Apple GPU, else very low."""
    from nearfar.edge_runtime.executors.mlx import device

    return 3 if device.installed() and device.has_metal() else -3


def _list() -> Sequence[ListedDevice]:
    from importlib.metadata import version

    from nearfar.edge_runtime.executors.mlx import device

    metal = device.has_metal()
    name, memory = device.describe()
    kind = "gpu" if metal else "cpu"
    return [
        ListedDevice(
            "mlx", name, kind, f"MLX {version('mlx')}", tuple(device.features()), memory, device.limits()
        )
    ]


DEVICE = Device(_probe, _open, _preferred, _list, kv_bits=(8, 4))
