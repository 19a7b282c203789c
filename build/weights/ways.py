"""Chooses how the scales of our own quantization are stored, among ways that take no more bytes than float16
pairs.

Half as many inputs share a scale where it needs half the bytes: a float16 scale without an offset, or a scale
and an offset of 6 bits with float16 factors for 256 inputs. Which way loses least depends on the matrix, so
each way is tried and its error measured (docs/decisions/0029-scales-by-measured-loss.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nearfar.build.weights.quantize import F32, Scheme
from nearfar.errors import BuildError
from nearfar.format.scales import PAIRS, Scales, matrix_bytes
from nearfar.kernels.quantized import Matrix, StorableMatrices

WAYS = ("pairs", "single", "levels")
"""Names of the ways on the command line: float16 pairs, float16 scales alone, scales in two levels."""

LONGEST = 1280
"""The most inputs of a superblock, whose integers are unpacked together on a processor. Of the widths that
256 does not divide, common models have 576, 640, 896, 960 and 1,152. The error of a superblock of 896
inputs is at most 1 % larger than that of superblocks of 224 (Qwen2.5-Coder-0.5B, 2 to 4 bits).
"""


def way(scales: Scales) -> str:
    """The name of a way of storing scales on the command line."""
    if scales.superblock:
        return "levels"
    return "pairs" if scales.offsets else "single"


def ways(scheme: Scheme, k: int, held: StorableMatrices) -> list[Scheme]:
    """The ways of storing a matrix with k inputs that take no more bytes than `scheme`, which has float16
    pairs: `scheme` itself if `held` has pairs, and each of the others with half as many inputs in a group.

    If `held` has several ways with one name, it is the one that takes most bytes. Two levels without offsets
    are not among them: scales and offsets lose less at these sizes. If rows are not whole superblocks of two
    levels, a superblock is the largest part of a row that LONGEST allows.
    """
    assert scheme.scales == PAIRS, scheme
    found = [scheme] if PAIRS in held.scales else []
    for name in WAYS[1:]:
        fitting = [
            narrow
            for scales in held.scales
            if way(scales) == name and scales.offsets == bool(scales.superblock) and not scales.table
            and (group := scheme.group_size // 2) in held.groups
            and (narrow := Scheme(scheme.bits, group, _in_rows(scales, k, group))).fits(k)
            and _bytes(narrow, k) <= _bytes(scheme, k)
        ]  # fmt: skip
        found += sorted(fitting, key=lambda narrow: _bytes(narrow, k))[-1:]
    return found or [scheme]


def _in_rows(scales: Scales, k: int, group: int) -> Scales:
    """The way with superblocks that fit rows of k inputs in groups of `group`, if there are any."""
    if scales.fits(k):
        return scales
    lengths = (k // parts for parts in range(1, k // scales.superblock + 1) if k % parts == 0)
    fitting = (length for length in lengths if length <= LONGEST and length % group == 0)
    return replace(scales, superblock=next(fitting, scales.superblock))


def _bytes(scheme: Scheme, k: int) -> int:
    """Bytes of 8 rows, a whole number."""
    return matrix_bytes(8, k, scheme.bits, scheme.group_size, scheme.scales)


def stored_as(matrix: Matrix, scheme: Scheme) -> Matrix:
    """The matrix in a scheme."""
    return replace(matrix, bits=scheme.bits, group=scheme.group_size, scales=scheme.scales)


def squared_error(weight: F32, rounded: F32, importance: F32 | None) -> float:
    """Σ h·(w − ŵ)² over a matrix, h the importance of an input, or 1."""
    squares = np.square(weight - rounded)
    if importance is None:
        return float(squares.sum(dtype=np.float64))
    return float((squares @ importance).sum(dtype=np.float64))


def storable(names: Sequence[str] | None, held: Mapping[str, StorableMatrices]) -> StorableMatrices:
    """What our own quantization may store: the ways called `names`, None for all, as far as each target can
    (`held`, by the targets' names). Raises BuildError for an unknown name, and for a way that a target lacks.
    """
    unknown = [name for name in names or () if name not in WAYS]
    if unknown or (names is not None and not names):
        raise BuildError(f"unknown --scales {', '.join(unknown) or '(none)'}: use {', '.join(WAYS)}")
    for target, each in held.items():
        there = {way(scales) for scales in each.scales}
        for name in names or ():
            if name not in there:
                raise BuildError(
                    f"--scales {name}: target {target} stores {_told(there)} only: leave {name} out, or "
                    "build for this target apart"
                )
    groups = [
        size for size in StorableMatrices().groups if all(size in each.groups for each in held.values())
    ]
    common = [
        scales for scales in StorableMatrices().scales if all(scales in each.scales for each in held.values())
    ]
    wanted = [scales for scales in common if names is None or way(scales) in names]
    return StorableMatrices(tuple(groups), tuple(wanted), pieces=False)


def _told(names: Iterable[str]) -> str:
    return " and ".join(name for name in WAYS if name in names)


def first_of(names: Sequence[str], scheme: Scheme, k: int, held: StorableMatrices) -> Scheme:
    """The way that comes first in `names` and fits rows of k inputs; float16 pairs where none does."""
    found = {way(each.scales): each for each in ways(scheme, k, held)}
    return next((found[name] for name in names if name in found), scheme)
