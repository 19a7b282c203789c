"""The programs of a CPU artifact: one for each vector unit that was asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from nearfar.build.source import BuildOptions
from nearfar.edge_runtime.executors.cpu.features import architecture
from nearfar.errors import BuildError
from nearfar.format.manifest import Float
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import native
from nearfar.targets.cpu.units import BASELINE, CARRIED, Unit, unit_named
from nearfar.targets.kernels import Variant


KV: Float = "float16"
"""Of keys and values in the cache: a long context reads them as often as the weights."""


@dataclass(frozen=True, kw_only=True)
class CpuVariant(Variant):
    """A program for a vector unit."""

    unit: Unit


def variants(options: BuildOptions) -> tuple[CpuVariant, ...]:
    """One for each unit of `options.cpu_features`, the best first."""
    here = architecture()
    if here not in BASELINE:
        raise BuildError(f"the cpu target knows {', '.join(sorted(BASELINE))}; this machine is {here}")
    system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
    units = units_of(options.cpu_features, here)
    return tuple(
        CpuVariant(f"{here}-{system}-{unit.name}", "f32", CpuKernels(unit), kv=KV, unit=unit)
        for unit in units
    )


def units_of(asked: tuple[str, ...], here: str) -> tuple[Unit, ...]:
    """The units by the names that were asked for, each once; none: those that an artifact carries."""
    found = [_unit(name, here) for name in asked] or CARRIED[here]
    return tuple(dict.fromkeys(found))


def _unit(name: str, here: str) -> Unit:
    if name == "native":
        return native()
    return BASELINE[here] if name == "baseline" else unit_named(name, here)
