"""Machines in the words of manifests: architectures, systems, and the processor features that programs may
need. Both halves read these words: the build, which compiles for a machine, and the runtime on it.
"""

from __future__ import annotations

import platform
import sys

KNOWN = {
    "x86_64": ("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2", "avxvnni",
               "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16"),
    "aarch64": ("neon", "fullfp16", "dotprod", "i8mm", "sve"),
}  # fmt: skip
"""What kernels may use, by LLVM's names (as in the manifest's requires.features); other features do not
decide whether a library runs.
"""
ASSUMED = {"x86_64": KNOWN["x86_64"][:6], "aarch64": KNOWN["aarch64"][:1]}
"""What is taken for granted of a CPU whose features cannot be told: what any has that we make code for."""


def architecture() -> str:
    """The architecture of this machine: x86_64, aarch64, or what the platform calls it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def system() -> str:
    """The operating system: linux, macos, windows, android, or what Python calls it."""
    if hasattr(sys, "getandroidapilevel"):
        return "android"
    return {"darwin": "macos", "win32": "windows", "cygwin": "windows"}.get(sys.platform, sys.platform)
