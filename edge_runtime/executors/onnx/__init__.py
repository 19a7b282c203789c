"""ONNX Runtime on the CPU: each run of an onnx artifact's graph computes a batch of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nearfar.edge_runtime.devices import Device, ListedDevice, Settings
from nearfar.edge_runtime.found import Found
from nearfar.errors import DeviceError

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.executors.base import Executor
    from nearfar.format.manifest import Program


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("onnxruntime") is not None


def _preferred() -> int:
    """Device preference: after our own CPU kernels, but not after software GPUs."""
    return -1 if _installed() else -4


def _probe(which: str | None = None) -> Found:
    if not _installed():
        raise DeviceError(
            "the onnx device needs ONNX Runtime, which is not installed: pip install 'nearfar[onnx]'"
        )
    return Found(frozenset())


def _open(artifact: Artifact, program: Program, settings: Settings) -> Executor:
    from nearfar.edge_runtime.executors.onnx.executor import OnnxExecutor

    return OnnxExecutor(artifact, program, settings)


def _list() -> Sequence[ListedDevice]:
    import platform
    from importlib.metadata import version

    from nearfar.memory import host_memory

    _probe()
    name, memory = platform.processor() or platform.machine(), host_memory().total
    return [ListedDevice("onnx", name, "cpu", f"ONNX Runtime {version('onnxruntime')}", (), memory, {})]


DEVICE = Device(_probe, _open, _preferred, _list, pipelined=False)
