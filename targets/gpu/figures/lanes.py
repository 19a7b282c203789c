"""A launch's threads, workgroups and loop iterations as axes of NumPy arrays.

The last axis is the workgroup's threads, before it the workgroups, before those the loops, the innermost
first. Of long axes only some points are looked at: the first and the last, where what is ragged differs, and
evenly spaced ones that stand for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_] | None
"""Which points are active; None: all."""
BASE = 2
"""Axes of a launch: workgroups, threads."""
ALONG = 3  # workgroups looked at along each axis of the grid
STRATA = 24  # workgroups looked at where they differ in what they do
ITERATIONS = 32  # looked at of all loops around a statement together, but at least three of each


@dataclass(frozen=True)
class Axis:
    """Points of an axis, and how many each stands for."""

    points: Array
    weights: npt.NDArray[np.float64]

    @staticmethod
    def of(extent: int, most: int) -> Axis:
        """All points where they are no more than `most` (3 or more)."""
        if extent <= most:
            return Axis(np.arange(extent), np.ones(extent))
        weights = np.full(most, (extent - 2) / (most - 2))
        weights[[0, -1]] = 1
        return Axis(np.linspace(0, extent - 1, most).astype(np.int64), weights)


def even_workgroups(grid: tuple[int, int, int]) -> Axis:
    """Some of each axis of a grid whose workgroups do the same, but for those at its edges."""
    x, y, z = (Axis.of(extent, ALONG) for extent in grid)
    points = (z.points[:, None, None] * grid[1] + y.points[:, None]) * grid[0] + x.points
    weights = z.weights[:, None, None] * y.weights[:, None] * x.weights
    return Axis(points.reshape(-1), weights.reshape(-1))


def all_workgroups(grid: tuple[int, int, int]) -> Axis:
    """Every one."""
    return Axis.of(math.prod(grid), math.prod(grid))


def chosen_workgroups(work: npt.NDArray[np.float64]) -> Axis:
    """Some that stand for those that do about as much; `work` of each workgroup. All that do nothing are
    one.
    """
    order = np.argsort(work, kind="stable")
    nothing = int((work <= 0).sum())
    groups = [group for group in np.array_split(order[nothing:], STRATA) if len(group)]
    groups += [order[:nothing]] * (nothing > 0)
    points = [group[len(group) // 2] for group in groups]
    if len(order) > nothing:
        points[len(groups) - 1 - (nothing > 0)] = order[-1]  # the busiest is looked at
    return Axis(np.array(points, np.int64), np.array([float(len(group)) for group in groups]))


class Lanes:
    """The axes at a place in the program, and which of their points are active there."""

    def __init__(self, workgroups: Axis, threads: int) -> None:
        self._axes = [workgroups, Axis(np.arange(threads), np.ones(threads))]
        self.mask: Mask = None
        self._counted: tuple[Mask, float] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an array over all axes."""
        return tuple(len(axis.points) for axis in self._axes)

    def values(self, right: int) -> Array:
        """Points of the axis `right` places from the last, as an array that broadcasts."""
        return self._axes[-1 - right].points.reshape(-1, *[1] * right)

    def weights(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """What each point of the axes [first, last) stands for, as an array that broadcasts."""
        out = np.ones(())
        for axis in self._axes[first:last]:
            out = out[..., None] * axis.weights
        return out.reshape(*out.shape, *[1] * (len(self._axes) - last))

    @property
    def loops(self) -> int:
        """Loops around."""
        return len(self._axes) - BASE

    @contextmanager
    def loop(self, extent: int) -> Iterator[Array]:
        """Inside, one axis more; gives its points."""
        around = math.prod(self.shape[:-BASE])
        self._axes.insert(0, Axis.of(extent, max(ITERATIONS // around, 3)))
        self._counted = None
        try:
            yield self.values(len(self._axes) - 1)
        finally:
            del self._axes[0]
            self._counted = None

    @contextmanager
    def where(self, condition: Mask) -> Iterator[bool]:
        """Inside, only points with the condition are active; gives whether there are any."""
        before = self.mask
        if condition is not None:
            self.mask = condition if before is None else before & condition
        try:
            yield self.mask is None or bool(self.mask.any())
        finally:
            self.mask = before

    def each(self, amount: npt.NDArray[np.float64] | float = 1.0) -> npt.NDArray[np.float64]:
        """`amount` where active and else 0, over all axes."""
        active = amount if self.mask is None else amount * self.mask
        return np.broadcast_to(active, self.shape)

    def total(self) -> float:
        """Active points, with all that they stand for."""
        if self.mask is None:
            return math.prod(float(axis.weights.sum()) for axis in self._axes)
        if self._counted is None or self._counted[0] is not self.mask:  # asked for at every operation
            weighted = self.each() * self.weights(0, len(self._axes))
            self._counted = self.mask, float(weighted.sum())
        return self._counted[1]

    def per_thread(self, amount: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums over the loops, for each thread of each workgroup."""
        summed = amount * self.weights(0, self.loops)
        return np.asarray(summed.sum(axis=tuple(range(self.loops))))

    def workgroups(self) -> npt.NDArray[np.float64]:
        """How many workgroups each stands for that is looked at."""
        return self.weights(self.loops, self.loops + BASE - 1).reshape(-1)

    def first_active(self, values: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """In the iteration in which most are active: values and activity [workgroups, threads]."""
        shape = self.shape
        full = np.broadcast_to(values, shape).reshape(-1, *shape[-BASE:])
        if self.mask is None:
            return full[0], np.ones(shape[-BASE:], np.bool_)
        active = np.broadcast_to(self.mask, shape).reshape(full.shape)
        chosen = int(active.sum(axis=(1, 2)).argmax())
        return full[chosen], active[chosen]
