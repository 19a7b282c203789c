"""The cpu target."""

from __future__ import annotations

from nearfar.targets.cpu import packing
from nearfar.targets.cpu.emit import emit
from nearfar.targets.cpu.variants import variants
from nearfar.targets.planned import PlannedTarget

TARGET = PlannedTarget("cpu", packing, variants, {"kind": "llvm"}, emit)
