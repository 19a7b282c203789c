"""Machines in the words of manifests: architectures, operating systems, and processor features that programs
may need.

The build, which compiles for a machine, and the runtime on the machine use the same words.
"""

from __future__ import annotations

import platform
import sys

KNOWN = {
    "x86_64": ("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2", "avxvnni",
               "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16"),
    "aarch64": ("neon", "fullfp16", "dotprod", "i8mm", "sve"),
}  # fmt: skip
"""Processor features that kernels may use, by LLVM's names (as in the manifest's requires.features). No other
feature decides whether a library runs.
"""
ASSUMED = {"x86_64": KNOWN["x86_64"][:6], "aarch64": KNOWN["aarch64"][:1]}
"""Features that are assumed of a CPU that cannot be examined: every processor that we compile for
has them.
"""


def architecture() -> str:
    """The architecture of this machine: x86_64, aarch64, or the platform's own name."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def system() -> str:
    """The operating system: linux, macos, windows, android, or Python's own name."""
    if hasattr(sys, "getandroidapilevel"):
        return "android"
    return {"darwin": "macos", "win32": "windows", "cygwin": "windows"}.get(sys.platform, sys.platform)
