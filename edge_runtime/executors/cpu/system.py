"""What kind of machine this is, in the words of manifests."""

from __future__ import annotations

import platform
import sys


def architecture() -> str:
    """The machine's architecture: x86_64, aarch64, or what the platform calls it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def system() -> str:
    """The operating system: linux, macos, windows, android, or what Python calls it."""
    if hasattr(sys, "getandroidapilevel"):
        return "android"
    return {"darwin": "macos", "win32": "windows", "cygwin": "windows"}.get(sys.platform, sys.platform)
