"""The vulkan target."""

from __future__ import annotations

from nearfar.kernels.planned import Planned
from nearfar.targets.gpu import int8_products, packing, with_caches
from nearfar.targets.vulkan import VARIANTS
from nearfar.targets.vulkan.emit import emit

TARGET = Planned(
    "vulkan",
    VARIANTS[0].kernels,
    lambda asked: with_caches(VARIANTS, asked.kv_bits),
    {"kind": "vulkan", "host": "llvm"},
    emit,
    int8_products,
    held=packing.HELD,
)
