"""The vulkan target."""

from __future__ import annotations

from nearfar.targets.planned import PlannedTarget
from nearfar.targets.vulkan import KERNELS
from nearfar.targets.vulkan.emit import emit

TARGET = PlannedTarget("vulkan", KERNELS, {"kind": "vulkan", "host": "llvm"}, emit)
