"""The table of vector units that CPU kernels are made for. Kernels read differences between units here, never
from the building machine.

Kernels compute on vectors of 16 values on every unit (kernels/vec.py), which LLVM splits into registers. So
sums over lanes have the same 16 partial sums everywhere, and a text is the same on every unit that has fused
multiply-adds. A unit decides how many values a register holds, hence how large a tile may be, and which
instruction computes the integer sums of quantized matrices.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from nearfar.errors import BuildError

Architecture = Literal["x86_64", "aarch64", "wasm32"]
Dot = Literal["pmaddwd", "vpdpbusd", "smlal", "sdot", "usmmla", "dot_i16x8"]
"""The instruction that sums products of integers: pairs of int16 (pmaddwd, smlal, dot_i16x8), or four bytes
(vpdpbusd, sdot; usmmla: eight, of two rows by two), with 16-bit inputs as two bytes, 256·high + low.
"""


@dataclass(frozen=True)
class Unit:
    """One vector unit.

    `mcpu`: LLVM's name of the processor that code is compiled for. `features`: LLVM's names of the further
    features that a device must have, the manifest's requires.features. `lanes`: float32 values in a register.
    `registers`: the number of registers.
    """

    name: str
    architecture: Architecture
    mcpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    dot: Dot


_V3 = ("sse4.2", "avx", "avx2", "fma", "f16c", "bmi2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl")

UNITS = {
    unit.name: unit
    for unit in (
        Unit("avx2", "x86_64", "x86-64-v3", _V3, 8, 16, "pmaddwd"),
        Unit("avxvnni", "x86_64", "x86-64-v3", (*_V3, "avxvnni"), 8, 16, "vpdpbusd"),
        Unit("avx512", "x86_64", "x86-64-v4", (*_V4, "avx512vnni"), 16, 32, "vpdpbusd"),
        Unit("neon", "aarch64", "generic", ("neon",), 4, 32, "smlal"),
        Unit("dotprod", "aarch64", "generic", ("neon", "dotprod"), 4, 32, "sdot"),
        Unit("i8mm", "aarch64", "generic", ("neon", "dotprod", "i8mm"), 4, 32, "usmmla"),
        Unit("simd128", "wasm32", "generic", ("simd128",), 4, 16, "dot_i16x8"),
    )
}

BASELINE: dict[str, Unit] = {
    "x86_64": UNITS["avx2"], "aarch64": UNITS["neon"], "wasm32": UNITS["simd128"],
}  # fmt: skip
"""The unit that every supported processor of an architecture has."""

BEST_FIRST: dict[str, tuple[Unit, ...]] = {
    arch: tuple(unit for unit in reversed(UNITS.values()) if unit.architecture == arch) for arch in BASELINE
}
"""The units of each architecture, the best first."""

CARRIED: dict[str, tuple[Unit, ...]] = {
    "x86_64": (UNITS["avx512"], UNITS["avx2"]),
    "aarch64": (UNITS["dotprod"], UNITS["neon"]),
    "wasm32": (UNITS["simd128"],),
}
"""The units that an artifact has programs for by default, the best first."""


def nearest(architecture: str, features: Collection[str]) -> Unit:
    """The best unit for a processor with these features; BuildError if it lacks the baseline's."""
    for unit in BEST_FIRST[architecture]:
        if set(unit.features) <= set(features):
            return unit
    lacking = [feature for feature in BASELINE[architecture].features if feature not in features]
    raise BuildError(
        f"this processor lacks {', '.join(lacking)}, which kernels for {architecture} need: build for the "
        "machine that will run it (--cpu, without --cpu-features native)"
    )


def unit_named(name: str, architecture: str) -> Unit:
    """The unit of an architecture with a name; BuildError if there is none."""
    unit = UNITS.get(name)
    if unit is None or unit.architecture != architecture:
        known = ", ".join(each.name for each in UNITS.values() if each.architecture == architecture)
        raise BuildError(f"no unit of {architecture} is called {name!r}: use native, baseline or of {known}")
    return unit
