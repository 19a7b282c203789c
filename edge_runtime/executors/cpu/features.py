"""Which vector instructions this CPU has, by LLVM's names (as in the manifest's requires.features)."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from nearfar.edge_runtime.executors.cpu.system import architecture, system

# What the kernels may use; other features do not decide whether a library runs.
KNOWN = {
    "x86_64": ("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2", "avxvnni",
               "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16", "avx512fp16"),
    "aarch64": ("neon", "fullfp16", "dotprod", "i8mm", "sve"),
}  # fmt: skip
ASSUMED = {"x86_64": KNOWN["x86_64"][:6], "aarch64": KNOWN["aarch64"][:1]}
"""What is taken for granted of a CPU whose features cannot be told: what any has that we make code for."""

_LINUX_NAMES = {"asimd": "neon", "asimdhp": "fullfp16", "asimddp": "dotprod"}
_DARWIN_NAMES = {"FEAT_FP16": "fullfp16", "FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm", "AdvSIMD": "neon"}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The features of KNOWN that this CPU and this system offer; empty where they cannot be told."""
    return flags_of(system(), architecture())


def offered() -> frozenset[str]:
    """What code for this machine may use: its features, or where they cannot be told those of ASSUMED."""
    return cpu_flags() or frozenset(ASSUMED.get(architecture(), ()))


def flags_of(on: str, arch: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The same by the name of a system: none on those that we cannot ask, and where asking fails."""
    try:
        if on in ("linux", "android"):
            found = _linux_flags(cpuinfo)
        elif on == "macos":
            found = _darwin_flags()
        else:
            found = set()
    except (OSError, UnicodeDecodeError):
        found = set()
    return frozenset(name for name in KNOWN.get(arch, ()) if name in found)


def _linux_flags(cpuinfo: Path) -> set[str]:
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            words = value.split()
            # Linux writes avx512_vnni and sse4_2, LLVM avx512vnni and sse4.2
            return (
                {_LINUX_NAMES.get(w, w) for w in words}
                | {w.replace("_", "") for w in words}
                | {w.replace("_", ".") for w in words}
            )
    return set()


def _darwin_flags() -> set[str]:
    listed = subprocess.run(["sysctl", "-a"], capture_output=True, text=True, check=False).stdout
    found = set()
    for line in listed.splitlines():
        key, _, value = line.partition(":")
        if key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
            found |= {word.lower().replace("avx1.0", "avx") for word in value.split()}
        elif key.startswith("hw.optional.") and value.strip() == "1":
            found.add(_DARWIN_NAMES.get(key.rsplit(".", 1)[1], key))
    return found
