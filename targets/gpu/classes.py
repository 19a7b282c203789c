"""Classes of GPUs, with the figures that shape kernels for each.

A kernel cannot be measured on every device, so it must reach the figures of its class: bytes in flight in a
launch, threads, reads of a weight (docs/decisions/0015). The shapes of `software` were measured in
SwiftShader and lavapipe, which run on processors.
"""

from __future__ import annotations

from dataclasses import dataclass

from nearfar.format.adapters import DeviceClass as Name
from nearfar.kernels.contract import Products

SHARED_BYTES = 16384
"""Bytes of workgroup memory that every WebGPU device has."""


@dataclass(frozen=True)
class DeviceClass:
    """The figures that a class of devices requires of its kernels.

    Matvec: a workgroup has `threads`, at most `k_lanes` of them along k; a launch should have `in_flight`
    bytes of the matrix in flight (or all of it) and `launched` threads. Matmul: a workgroup has a `tile` of
    rows by columns and `tile_threads` threads. Attention: a workgroup has `positions` in decode, and a tile
    of `queries` rows by `keys` positions in prefill.
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
    """Threads that run in lockstep; a workgroup's size is a multiple."""
    shared_bytes: int = SHARED_BYTES
    """Bytes of workgroup memory that a kernel should not exceed; more leaves room for fewer workgroups."""
    read_again: int = 0
    """Bytes that a launch may read again from the device's cache to save another launch.

    It is the cost of a launch (2, 3, 5 µs) times the cache's bandwidth (2, 0.35, 0.1 TB/s), all assumed.
    """
    staged_bytes: int = 0
    """Bytes of workgroup memory of matmuls in float16 programs, where two tiles pay off; other kernels use
    `shared_bytes`.
    """
    grouped_rows: int = 0
    """The most rows for which a matvec works in groups, reading the matrix again for each, if a matmul would
    have few tiles. 0: a matvec has one group.
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
    """The facts about a program that shape its kernels.

    `half`: activations are float16, and products may be. `products`: the kind of products of many rows and a
    matrix, for jobs that allow it (see Products). `vectors`: the code generator joins four neighbouring loads
    into one (for the software kernels; kernels of other classes declare vectors themselves).
    """

    device: DeviceClass
    half: bool
    vectors: bool = False
    products: Products = "float"
