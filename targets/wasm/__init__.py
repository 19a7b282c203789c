"""The WebAssembly target: the cpu target's kernels and packing, as a module that browsers and Node run."""

from __future__ import annotations

from nearfar.targets.cpu import CpuKernels
from nearfar.targets.cpu.units import UNITS
from nearfar.targets.kernels import Variant

__all__ = ["VARIANTS"]

UNIT = UNITS["simd128"]
VARIANTS = (Variant(f"wasm32-{UNIT.name}", "f32", CpuKernels(UNIT), kv="float16"),)
