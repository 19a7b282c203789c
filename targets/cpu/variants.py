"""The programs of a CPU artifact: for each platform, one for each requested vector unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearfar.errors import BuildError
from nearfar.format.kv import OF_BITS
from nearfar.kernels.contract import Variant, kv_suffix
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.codegen import native
from nearfar.targets.cpu.platforms import Platform, host, platforms
from nearfar.targets.cpu.units import BASELINE, BEST_FIRST, CARRIED, UNITS, Unit, unit_named

if TYPE_CHECKING:
    from nearfar.kernels.planned import VariantOptions


@dataclass(frozen=True, kw_only=True)
class CpuVariant(Variant):
    """A program for a vector unit on a platform."""

    unit: Unit
    platform: Platform


def variants(asked: VariantOptions) -> tuple[CpuVariant, ...]:
    """One variant for each platform of `asked.cpu`, bits of `asked.kv_bits` and unit of `asked.cpu_features`,
    the best unit first.

    The name of a unit applies to the platforms of its architecture.
    """
    wanted = platforms(asked.cpu)
    there = {platform.architecture for platform in wanted}
    for name in asked.cpu_features:
        if name in UNITS and UNITS[name].architecture not in there:
            unit_named(name, wanted[0].architecture)
    return tuple(
        CpuVariant(
            f"{platform.name}-{unit.name}{kv_suffix(bits)}",
            "f32",
            CpuKernels(unit),
            kv=OF_BITS[bits],
            unit=unit,
            platform=platform,
        )
        for platform in wanted
        for bits in asked.kv_bits
        for unit in units_of(asked.cpu_features, platform)
    )


def units_of(asked: tuple[str, ...], platform: Platform) -> tuple[Unit, ...]:
    """The units with the requested names, each once; without names, the units that artifacts have
    by default.
    """
    if not asked:
        return CARRIED[platform.architecture]
    own = [name for name in asked if name not in UNITS or UNITS[name].architecture == platform.architecture]
    if not own:
        raise BuildError(
            f"--cpu-features {','.join(asked)} names no unit of {platform.name}: add one of "
            f"{', '.join(unit.name for unit in BEST_FIRST[platform.architecture])}, or baseline"
        )
    return tuple(dict.fromkeys(_unit(name, platform) for name in own))


def host_or_none() -> Platform | None:
    """The platform of this machine; None if the cpu target does not support it."""
    try:
        return host()
    except BuildError:
        return None


def _unit(name: str, platform: Platform) -> Unit:
    if name == "native":
        if platform != host_or_none():
            raise BuildError(
                f"--cpu-features native means this machine's instructions, and --cpu is {platform.name}: "
                "leave --cpu-features out, or name units such as baseline"
            )
        return native()
    return BASELINE[platform.architecture] if name == "baseline" else unit_named(name, platform.architecture)
