"""Classes of GPUs, and what kernels for each are shaped by.

A kernel cannot be measured on every device, so what it must reach is a figure of its class: how many bytes a
launch has under way, how many threads it runs, how often it reads a weight (docs/decisions/0015). The shapes
of `software` were measured in SwiftShader and lavapipe, which run on processors.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.adapters import DeviceClass as Name
from nearfar.kernels.contract import Products

SHARED_BYTES = 16384
"""Workgroup memory that every WebGPU device has."""


@dataclass(frozen=True)
class DeviceClass:
    """What a class of devices wants of its kernels.

    Matvec: `threads` of a workgroup, at most `k_lanes` of them along k; a launch should have `in_flight`
    bytes of the matrix under way (or all of it) and `launched` threads. Matmul: a workgroup's `tile` of rows
    by columns, of `tile_threads` threads. Attention: `positions` of a workgroup in decode, `queries` rows by
    `keys` positions of a tile in prefill.
    """

    name: Name
    threads: int
    k_lanes: int
    in_flight: int
    launched: int
    tile: tuple[int, int]
    tile_threads: int
    positions: int
    queries: int
    keys: int
    subgroup: int
    """Threads that run in lockstep: a workgroup is a multiple of them."""
    shared_bytes: int = SHARED_BYTES
    """Workgroup memory that a kernel should keep to: more costs it other workgroups."""
    read_again: int = 0
    """Bytes that a launch may read again from the device's cache, if another launch is spared by it: what a
    launch takes (2, 3, 5 µs) times the cache's bandwidth (2, 0.35, 0.1 TB/s), all assumed.
    """
    staged_bytes: int = 0
    """Workgroup memory of matmuls in float16 programs, where two tiles are worth more; elsewhere
    `shared_bytes`.
    """
    grouped_rows: int = 0
    """Rows of a matrix's product up to which a matvec takes them in groups, and reads the matrix again for
    each, where the tiles of a matmul are few. 0: a matvec has one group.
    """


SOFTWARE = DeviceClass("software", 32, 1, 0, 0, (8, 256), 32, 32, 1, 32, 1)
MOBILE = DeviceClass(
    "mobile", 64, 8, 128 << 10, 2048, (32, 64), 128, 64, 16, 16, 64, SHARED_BYTES // 2, 512 << 10
)
INTEGRATED = DeviceClass(
    "integrated", 128, 16, 512 << 10, 8192, (64, 64), 256, 64, 32, 32, 32, read_again=1 << 20
)
DISCRETE = DeviceClass(
    "discrete", 256, 32, 2 << 20, 16384, (64, 64), 256, 64, 32, 32, 64, read_again=4 << 20,
    staged_bytes=2 * SHARED_BYTES, grouped_rows=16,
)  # fmt: skip
CLASSES = {each.name: each for each in (SOFTWARE, MOBILE, INTEGRATED, DISCRETE)}


@dataclass(frozen=True)
class Tuning:
    """What the kernels of a program are made for.

    `half`: activations are float16, and products may be. `products`: of many rows and a matrix, where the job
    allows it (see Products). `vectors`: the code generator makes one load of four neighbours (the software
    kernels' way; kernels of other classes declare vectors themselves).
    """

    device: DeviceClass
    half: bool
    vectors: bool = False
    products: Products = "float"
