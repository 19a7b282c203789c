"""Schemes with other scales than float16 pairs, as (bits, group size, scales)."""

from __future__ import annotations

from nearfar.format.scales import IQ4, SYMMETRIC, Scales

STORED_AS = [
    (5, 32, SYMMETRIC), (8, 32, SYMMETRIC), (4, 32, SYMMETRIC), (4, 128, SYMMETRIC), (3, 64, SYMMETRIC),
    (4, 32, Scales(6, True, 256)), (5, 32, Scales(6, True, 256)), (2, 16, Scales(4, True, 256)),
    (3, 16, Scales(6, False, 256)), (6, 16, Scales(8, False, 256)),
    (4, 64, Scales(6, True, 256)), *((4, 32, how) for how in IQ4.values()),
]  # fmt: skip

ODD = [
    (4, 32, 576, Scales(6, True, 576)), (3, 32, 896, Scales(6, True, 448)),
    (2, 64, 704, Scales(4, True, 704)), (5, 32, 320, Scales(6, True, 160)),
    (8, 64, 960, Scales(6, True, 960)),
]  # fmt: skip
"""Superblocks of other lengths, as (bits, group size, inputs of a row, scales): their integers fill a part
of the last word or half line of a plane.
"""
