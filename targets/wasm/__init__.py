"""The WebAssembly target: the cpu target's kernels and packing, as a module that browsers and Node run."""

from __future__ import annotations

from nearfar.targets.cpu import CpuKernels
from nearfar.targets.kernels import Variant

__all__ = ["VARIANTS"]

VARIANTS = (Variant("wasm32-simd128", "f32", CpuKernels()),)
