"""Calibrates how the keys of a 4-bit cache are rounded (nearfar.format.kv.rounding), by a forward over a
text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from nearfar.build.calibration.arithmetic import Array
from nearfar.build.calibration.forward import Forward, stretches
from nearfar.build.calibration.solve import FloatWeights
from nearfar.build.calibration.text import CalibrationText
from nearfar.build.options import BuildOptions
from nearfar.build.source import Source
from nearfar.build.weights.quantize import F32
from nearfar.build.weights.solved import Solved
from nearfar.format.kv import group_size
from nearfar.step import ops

WINDOWS = 8
BEHIND = 0.001
"""Share of the keys that may lie beyond either end of the range whose middle is subtracted: the first keys of
a sequence are unlike all others.
"""
RIDGE = 0.1
"""Share of the queries' mean square that is added to the denominator: it keeps weights small where queries
hardly see an offset.
"""
BITS = 4


def with_rounding(
    options: BuildOptions,
    source: Source,
    text: Callable[[], CalibrationText],
    solved: Solved | None,
    progress: Callable[[str, int, int], None],
) -> Source:
    """Add the rounding of keys to the source where the options want programs that use it; the source's report
    names the calibration text.
    """
    if not options.rounds_keys:
        return source
    part = text().part(WINDOWS)
    tell = partial(progress, "calibrating the keys of the 4-bit cache")
    found = key_rounding(source, solved, part, tell)
    source.report.keys = part.description
    return replace(source, rounding=found)


@dataclass
class _Seen:
    """Statistics of one cache: its keys, a list of arrays [rows, kv_heads, head_dim]; and, by head and group,
    for queries q with sum s over the group, the sums of s·q [kv_heads, groups, size] and of q·q [kv_heads,
    groups].
    """

    keys: list[Array] = field(default_factory=list)
    products: Array | float = 0.0
    squares: Array | float = 0.0

    def append(self, keys: Array) -> None:
        """Add keys [windows, kv_heads, length, head_dim]."""
        self.keys.append(keys.swapaxes(1, 2).reshape(-1, keys.shape[1], keys.shape[-1]))

    def attend(self, queries: Array) -> None:
        """Add queries [windows, kv_heads, heads of each, length, head_dim]."""
        kv_heads, head_dim = queries.shape[1], queries.shape[-1]
        size = group_size(head_dim, BITS)
        assert size is not None  # PlannedTarget.check has rejected other sizes
        parted = queries.swapaxes(0, 1).reshape(kv_heads, -1, head_dim // size, size)
        self.products = self.products + np.einsum("hrg,hrgd->hgd", parted.sum(-1), parted)
        self.squares = self.squares + np.einsum("hrgd,hrgd->hg", parted, parted)

    def rounding(self) -> F32:
        """The middle of the keys' range and the weights of the offsets, float32 [2, kv_heads, head_dim]; NaN
        and Inf become 0.
        """
        keys = np.concatenate(self.keys)
        ends = np.quantile(keys, [BEHIND, 1 - BEHIND], axis=0)
        products = np.asarray(self.products)
        seen = products.sum(-1) + RIDGE * self.squares  # the sum of s·q over the group is s²
        weights = products / np.where(seen > 0, seen, 1)[..., None]
        made = np.stack([ends.mean(0), weights.reshape(keys.shape[1:])])
        # float16 is precise enough, and mostly gives the same bits on every machine.
        return np.asarray(np.nan_to_num(made, posinf=0, neginf=0), np.float16).astype(np.float32)


def key_rounding(
    source: Source,
    solved: Solved | None,
    text: CalibrationText,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, F32]:
    """For each cache float32 [2, kv_heads, head_dim]: the middle of its keys' range, and M·1 / 1ᵀM·1 for each
    group, with M the second moments of the queries that read the cache.

    The second are the weights with which a group's offset absorbs its components' rounding errors so that q·k
    changes least. `advance` gets the number of finished stretches and of all.
    """
    step = source.model.step
    forward = Forward(step, text.windows)
    seen = [_Seen() for _ in step.caches]

    def heads(op: ops.RopeAppend | ops.Attend, values: Array) -> None:
        (seen[op.cache].append if isinstance(op, ops.RopeAppend) else seen[op.cache].attend)(values)

    parts = stretches(step)
    while not any(isinstance(op, ops.Attend) for op in parts[-1].ops):
        parts.pop()  # the operations after the last attention are not needed
    for index, stretch in enumerate(parts):
        advance(index, len(parts))
        forward.advance(stretch, FloatWeights(source, solved), heads=heads)
    advance(len(parts), len(parts))
    return {cache: each.rounding() for cache, each in enumerate(seen)}
