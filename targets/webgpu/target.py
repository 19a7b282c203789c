"""The webgpu target."""

from __future__ import annotations

from nearfar.kernels.planned import Planned
from nearfar.targets.gpu import int8_products, packing, with_caches
from nearfar.targets.webgpu import VARIANTS
from nearfar.targets.webgpu.emit import emit

TARGET = Planned(
    "webgpu",
    VARIANTS[0].kernels,
    lambda asked: with_caches(VARIANTS, asked.kv_bits),
    {"kind": "webgpu", "host": "llvm"},
    emit,
    int8_products,
    bundled=True,
    held=packing.HELD,
)
