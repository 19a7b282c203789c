"""What must happen before a process opens a Vulkan driver, whichever library opens it."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module


def prepare() -> None:
    """Keep Mesa quiet, and alive beside PyTorch."""
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # without it Mesa complains on stderr at each start
    with contextlib.suppress(ImportError):
        # PyTorch imports Triton where it is installed, and Triton's LLVM crashes the process if it is loaded
        # after the one of Mesa's lavapipe (libLLVM 15; seen with Triton 3.9). The other way round they get
        # along.
        import_module("triton._C.libtriton")
