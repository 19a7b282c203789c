"""The CPU: the artifact's own shared library replays the plans."""

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
    from nearfar.format.machines import ASSUMED, architecture, system
    from nearfar.format.processor import offered

    features, arch, on = offered(), architecture(), system()
    advice = f"build it, on any machine, with nearfar build --target cpu --cpu {arch}-{on}"
    if not features >= set(ASSUMED.get(arch, ())):
        advice = f"code that nearfar builds for {arch} needs {', '.join(ASSUMED[arch])} at least"
    return Found(features, arch=arch, system=on, advice=advice)


def _open(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.cpu.executor import CpuExecutor

    return CpuExecutor(artifact, program, settings)


def _list() -> Sequence[ListedDevice]:
    import platform

    import psutil

    from nearfar.format.machines import architecture
    from nearfar.memory import host_memory

    name = platform.processor() or architecture()
    memory = host_memory().total
    limits = {"cores": psutil.cpu_count(logical=False) or 1, "threads": psutil.cpu_count() or 1}
    return [
        ListedDevice("cpu", name, "cpu", architecture(), tuple(sorted(_probe().features)), memory, limits)
    ]


DEVICE = Device(_probe, _open, lambda: 0, _list, pipelined=False, native=True)
