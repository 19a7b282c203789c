"""The webgpu target."""

from __future__ import annotations

from nearfar.targets.gpu import rounds
from nearfar.targets.planned import PlannedTarget
from nearfar.targets.webgpu import VARIANTS
from nearfar.targets.webgpu.emit import emit

TARGET = PlannedTarget(
    "webgpu",
    VARIANTS[0].kernels,
    lambda _: VARIANTS,
    {"kind": "webgpu", "host": "llvm"},
    emit,
    rounds,
    packed=True,
)
