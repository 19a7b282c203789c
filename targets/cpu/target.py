"""The cpu target."""

from __future__ import annotations

from nearfar.kernels.buckets import Buckets
from nearfar.kernels.planned import Planned
from nearfar.kernels.quantized import StorableMatrices
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.emit import emit
from nearfar.targets.cpu.variants import variants

# From four rows on the cost of a step grows with its rows: a bucket twice too large takes twice as long.
BUCKETS = Buckets(step=(1, 2, 4, 8, 16, 32, 64, 256))
TARGET = Planned("cpu", packing, variants, {"kind": "llvm"}, emit, buckets=BUCKETS, held=StorableMatrices())
