"""The WebAssembly target: the cpu target's kernels and packing, as a module for browsers and Node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearfar.format.kv import OF_BITS
from nearfar.kernels.contract import Variant, kv_suffix
from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.units import UNITS

if TYPE_CHECKING:
    from nearfar.kernels.planned import VariantOptions

__all__ = ["variants"]

UNIT = UNITS["simd128"]


def variants(asked: VariantOptions) -> tuple[Variant, ...]:
    """One variant for each of `asked.kv_bits`."""
    return tuple(
        Variant(f"wasm32-{UNIT.name}{kv_suffix(bits)}", "f32", CpuKernels(UNIT), kv=OF_BITS[bits])
        for bits in asked.kv_bits
    )
