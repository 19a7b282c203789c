"""Runs artifacts on devices from Python: engine, KV cache, executors."""

from nearfar.edge_runtime.api import AsyncEngine, AsyncStream
from nearfar.edge_runtime.artifact import Artifact
from nearfar.edge_runtime.sampling import SamplingParams
from nearfar.edge_runtime.snapshots import Snapshot
from nearfar.edge_runtime.sync import Engine, Stream

__all__ = ["Artifact", "AsyncEngine", "AsyncStream", "Engine", "SamplingParams", "Snapshot", "Stream"]
