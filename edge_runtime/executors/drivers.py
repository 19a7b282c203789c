"""Prepares a process for Vulkan drivers, whichever library opens them."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module


def prepare() -> None:
    """Keep Mesa from complaining, and from crashing in a process with PyTorch."""
    # Without this variable Mesa complains on stderr at each start.
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")
    with contextlib.suppress(ImportError):
        # PyTorch imports Triton if it is installed, and Triton's LLVM crashes the process if it is loaded
        # after the LLVM of Mesa's lavapipe (libLLVM 15; seen with Triton 3.9). Loaded in the other order,
        # both work.
        import_module("triton._C.libtriton")
