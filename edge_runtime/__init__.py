"""Runs artifacts on devices from Python: engine, KV cache, executors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearfar.edge_runtime.artifact.reader import Artifact
    from nearfar.edge_runtime.engine.sampling_params import SamplingParams
    from nearfar.edge_runtime.openai.api import AsyncEngine
    from nearfar.edge_runtime.openai.decisions import Decision
    from nearfar.edge_runtime.openai.stream import AsyncStream
    from nearfar.edge_runtime.openai.sync import Engine, Stream
    from nearfar.edge_runtime.progress import Progress
    from nearfar.edge_runtime.snapshots import Snapshot

__all__ = [
    "Artifact",
    "AsyncEngine",
    "AsyncStream",
    "Decision",
    "Engine",
    "Progress",
    "SamplingParams",
    "Snapshot",
    "Stream",
]

_HOMES = {
    "Artifact": "artifact.reader",
    "AsyncEngine": "openai.api",
    "AsyncStream": "openai.stream",
    "Decision": "openai.decisions",
    "Engine": "openai.sync",
    "Progress": "progress",
    "SamplingParams": "engine.sampling_params",
    "Snapshot": "snapshots",
    "Stream": "openai.sync",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: reading a manifest (`nearfar inspect`) needs no tokenizers and no
    devices.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
