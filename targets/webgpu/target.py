"""The webgpu target."""

from __future__ import annotations

from nearfar.targets.gpu import rounds, with_caches
from nearfar.targets.planned import PlannedTarget
from nearfar.targets.webgpu import VARIANTS
from nearfar.targets.webgpu.emit import emit

TARGET = PlannedTarget(
    "webgpu",
    VARIANTS[0].kernels,
    lambda options: with_caches(VARIANTS, options.kv_bits),
    {"kind": "webgpu", "host": "llvm"},
    emit,
    rounds,
    packed=True,
)
