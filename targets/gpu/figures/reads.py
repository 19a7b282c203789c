"""The loads of one buffer by a launch, added up load by load from the addresses of its threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .lanes import Array, Lanes

LINE = 128
"""Bytes of a cache line."""
LOCKSTEP = 32
"""Neighbouring threads whose loads a GPU joins."""


@dataclass
class Reads:
    """Loads of a buffer by the whole launch.

    `loads`: load instructions, counted for each thread; `loaded`: their bytes; `fetched`: bytes of different
    addresses, counted once for each load of a workgroup (bytes that its threads load together are fetched
    once). `used`, `touched`: bytes of different addresses for each 32 neighbouring threads, and the bytes of
    the 128-byte lines that contain them.
    """

    loads: float = 0.0
    loaded: float = 0.0
    fetched: float = 0.0
    used: float = 0.0
    touched: float = 0.0

    def add(self, lanes: Lanes, index: Array, size: int) -> float:
        """Add a load of `size` bytes at index·size; returns the share of it that no neighbour loads too."""
        count = lanes.total()
        if not count:
            return 0.0
        at, active = lanes.first_active(index)
        weight = lanes.workgroups()  # the number of workgroups for which each computed one stands
        threads = float((weight * active.sum(-1)).sum())
        together = float((weight * _different(at, active)).sum()) / threads
        groups = -(-at.shape[1] // LOCKSTEP)
        fill = ((0, 0), (0, groups * LOCKSTEP - at.shape[1]))
        joined: Array = np.pad(at, fill).reshape(-1, groups, LOCKSTEP)
        here: npt.NDArray[np.bool_] = np.pad(active, fill).reshape(-1, groups, LOCKSTEP)
        self.loads += count
        self.loaded += count * size
        self.fetched += count * size * together
        self.used += count * size * float((weight @ _different(joined, here)).sum()) / threads
        lines = float((weight @ _different(joined * size // LINE, here)).sum()) / threads
        self.touched += count * LINE * lines
        return together


def _different(values: Array, active: npt.NDArray[np.bool_]) -> Array:
    """The number of different active values along the last axis."""
    none = values.max(initial=0) + 1
    ordered = np.sort(np.where(active, values, none), axis=-1)
    changes = (np.diff(ordered, axis=-1) != 0).sum(-1)
    return np.asarray(changes + active.all(-1))
