"""Schemes with other scales than float16 pairs, as (bits, group size, scales)."""

from __future__ import annotations

from nearfar.format.scales import IQ4, SYMMETRIC, Scales

STORED_AS = [
    (5, 32, SYMMETRIC), (8, 32, SYMMETRIC), (4, 32, SYMMETRIC), (4, 128, SYMMETRIC), (3, 64, SYMMETRIC),
    (4, 32, Scales(6, True, 256)), (5, 32, Scales(6, True, 256)), (2, 16, Scales(4, True, 256)),
    (3, 16, Scales(6, False, 256)), (6, 16, Scales(8, False, 256)),
    (4, 64, Scales(6, True, 256)), *((4, 32, how) for how in IQ4.values()),
]  # fmt: skip
