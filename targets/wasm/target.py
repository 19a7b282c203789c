"""The wasm target."""

from __future__ import annotations

from nearfar.kernels.planned import Planned
from nearfar.kernels.quantized import StorableMatrices
from nearfar.targets.cpu import packing
from nearfar.targets.wasm import variants
from nearfar.targets.wasm.emit import emit, with_threads

# Each program exists twice: for shared memory, with threads, and for a memory of its own.
TARGET = Planned(
    "wasm",
    packing,
    variants,
    {"kind": "llvm"},
    emit,
    bundled=True,
    held=StorableMatrices(),
    twin=with_threads,
)
