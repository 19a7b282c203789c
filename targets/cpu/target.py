"""The cpu target."""

from __future__ import annotations

from nearfar.targets.cpu import VARIANTS
from nearfar.targets.cpu.emit import emit
from nearfar.targets.planned import PlannedTarget

TARGET = PlannedTarget("cpu", VARIANTS, {"kind": "llvm"}, emit)
