"""The vulkan target."""

from __future__ import annotations

from nearfar.targets.gpu import rounds, with_caches
from nearfar.targets.planned import PlannedTarget
from nearfar.targets.vulkan import VARIANTS
from nearfar.targets.vulkan.emit import emit

TARGET = PlannedTarget(
    "vulkan",
    VARIANTS[0].kernels,
    lambda options: with_caches(VARIANTS, options.kv_bits),
    {"kind": "vulkan", "host": "llvm"},
    emit,
    rounds,
)
