"""Finds the processor features of this machine, among those that manifests name (machines.py)."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nearfar.children import child_environment
from nearfar.format.machines import ASSUMED, KNOWN, architecture, system

_LINUX_NAMES = {"asimd": "neon", "asimdhp": "fullfp16", "asimddp": "dotprod"}
_DARWIN_NAMES = {"FEAT_FP16": "fullfp16", "FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm", "AdvSIMD": "neon"}

_WINDOWS_NUMBERS: dict[str, dict[int, tuple[str, ...]]] = {
    "x86_64": {38: KNOWN["x86_64"][:1], 39: ("avx",), 40: KNOWN["x86_64"][2:6], 41: ("avx512f",)},
    "aarch64": {19: ("neon",), 43: ("dotprod",), 46: ("sve",), 66: ("i8mm",), 67: ("fullfp16",)},
}
"""The numbers that Windows has for features (PF_… of its winnt.h), and the features that each implies.

It has no number for FMA and F16C, and one for BMI2 lately: every processor with AVX2 has them. Nor has it
one for VNNI or for the other parts of AVX-512, and not every processor with its foundation has those. A wrong
guess would end the process, so on Windows the program for AVX2 runs there.
"""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The features in KNOWN that this CPU and operating system offer; empty if they cannot be found out."""
    return flags_of(system(), architecture())


def offered() -> frozenset[str]:
    """The features that code for this machine may use: those found, or else those of ASSUMED."""
    return cpu_flags() or frozenset(ASSUMED.get(architecture(), ()))


def _present(number: int) -> bool:
    """Whether Windows reports a feature; OSError on other systems."""
    if sys.platform != "win32":
        raise OSError("only Windows can be asked")
    return bool(ctypes.WinDLL("kernel32").IsProcessorFeaturePresent(number))


def flags_of(
    on: str,
    arch: str,
    cpuinfo: Path = Path("/proc/cpuinfo"),
    present: Callable[[int], bool] = _present,
) -> frozenset[str]:
    """The processor's features, by the name of its operating system; empty if the system cannot report them.

    `present`: whether Windows reports a feature, given its number.
    """
    try:
        if on in ("linux", "android"):
            found = _linux_flags(cpuinfo)
        elif on == "macos":
            found = _darwin_flags()
        elif on == "windows":
            found = _windows_flags(arch, present)
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
    listed = subprocess.run(
        ["sysctl", "-a"], env=child_environment(), capture_output=True, text=True, check=False
    ).stdout
    found = set()
    for line in listed.splitlines():
        key, _, value = line.partition(":")
        if key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
            found |= {word.lower().replace("avx1.0", "avx") for word in value.split()}
        elif key.startswith("hw.optional.") and value.strip() == "1":
            found.add(_DARWIN_NAMES.get(key.rsplit(".", 1)[1], key))
    return found


def _windows_flags(arch: str, present: Callable[[int], bool]) -> set[str]:
    """The features that Windows reports. Before Windows 10 2004 it reports none of these."""
    numbers = _WINDOWS_NUMBERS.get(arch, {})
    return {name for number, names in numbers.items() if present(number) for name in names}
