"""nearfar: language models on whatever device the user has, with the cloud behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nearfar.version import __version__

__all__ = ["AsyncEngine", "Engine", "__version__"]

if TYPE_CHECKING:
    from nearfar.edge_runtime import AsyncEngine as AsyncEngine
    from nearfar.edge_runtime import Engine as Engine


def __getattr__(name: str) -> Any:
    """Import `nearfar.Engine` and `nearfar.AsyncEngine` when they are first used: builds need neither."""
    if name in ("Engine", "AsyncEngine"):
        from nearfar import edge_runtime

        return getattr(edge_runtime, name)
    raise AttributeError(f"module 'nearfar' has no attribute {name!r}")
