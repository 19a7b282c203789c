"""A launch's threads, workgroups and loop iterations as axes of NumPy arrays.

The last axis is the workgroup's threads, the one before it the workgroups, and the axes before those are
loops, the innermost first. On long axes only some points are computed: the first and the last, where ragged
work differs, and evenly spaced ones that stand for the rest.
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
"""The mask of active points; None: all are active."""
BASE = 2
"""Axes of a launch: workgroups, threads."""
ALONG = 3  # workgroups computed along each axis of the grid
STRATA = 24  # workgroups computed if their work differs
ITERATIONS = 32  # iterations computed in all loops around a statement together; at least three in each


@dataclass(frozen=True)
class Axis:
    """Points of an axis, each with the number of points that it stands for."""

    points: Array
    weights: npt.NDArray[np.float64]

    @staticmethod
    def of(extent: int, most: int) -> Axis:
        """An axis with all points of `extent`, or with `most` (3 or more) if there are more."""
        if extent <= most:
            return Axis(np.arange(extent), np.ones(extent))
        weights = np.full(most, (extent - 2) / (most - 2))
        weights[[0, -1]] = 1
        return Axis(np.linspace(0, extent - 1, most).astype(np.int64), weights)


def even_workgroups(grid: tuple[int, int, int]) -> Axis:
    """Sample workgroups of a grid whose workgroups do the same work, except at its edges."""
    x, y, z = (Axis.of(extent, ALONG) for extent in grid)
    points = (z.points[:, None, None] * grid[1] + y.points[:, None]) * grid[0] + x.points
    weights = z.weights[:, None, None] * y.weights[:, None] * x.weights
    return Axis(points.reshape(-1), weights.reshape(-1))


def all_workgroups(grid: tuple[int, int, int]) -> Axis:
    """All workgroups of a grid."""
    return Axis.of(math.prod(grid), math.prod(grid))


def chosen_workgroups(work: npt.NDArray[np.float64]) -> Axis:
    """Sample workgroups by their `work`: each stands for those that do about as much, and one for all that do
    nothing.
    """
    order = np.argsort(work, kind="stable")
    nothing = int((work <= 0).sum())
    groups = [group for group in np.array_split(order[nothing:], STRATA) if len(group)]
    groups += [order[:nothing]] * (nothing > 0)
    points = [group[len(group) // 2] for group in groups]
    if len(order) > nothing:
        points[len(groups) - 1 - (nothing > 0)] = order[-1]  # the busiest workgroup is always included
    return Axis(np.array(points, np.int64), np.array([float(len(group)) for group in groups]))


class Lanes:
    """The axes at a place in the program, and the points that are active there."""

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
        """The number of points that each point of the axes [first, last) stands for, as an array that
        broadcasts.
        """
        out = np.ones(())
        for axis in self._axes[first:last]:
            out = out[..., None] * axis.weights
        return out.reshape(*out.shape, *[1] * (len(self._axes) - last))

    @property
    def loops(self) -> int:
        """The number of loops around this place."""
        return len(self._axes) - BASE

    @contextmanager
    def loop(self, extent: int) -> Iterator[Array]:
        """Enter a loop: adds an axis in the context, and yields the axis's points."""
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
        """In the context, only points with the condition are active; yields whether there are any."""
        before = self.mask
        if condition is not None:
            self.mask = condition if before is None else before & condition
        try:
            yield self.mask is None or bool(self.mask.any())
        finally:
            self.mask = before

    def each(self, amount: npt.NDArray[np.float64] | float = 1.0) -> npt.NDArray[np.float64]:
        """`amount` at active points and 0 elsewhere, over all axes."""
        active = amount if self.mask is None else amount * self.mask
        return np.broadcast_to(active, self.shape)

    def total(self) -> float:
        """The number of active points, each counted with those that it stands for."""
        if self.mask is None:
            return math.prod(float(axis.weights.sum()) for axis in self._axes)
        # the count is cached, because all operations ask for it
        if self._counted is None or self._counted[0] is not self.mask:
            weighted = self.each() * self.weights(0, len(self._axes))
            self._counted = self.mask, float(weighted.sum())
        return self._counted[1]

    def per_thread(self, amount: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sum an amount over the loops, for each thread of each workgroup."""
        summed = amount * self.weights(0, self.loops)
        return np.asarray(summed.sum(axis=tuple(range(self.loops))))

    def workgroups(self) -> npt.NDArray[np.float64]:
        """For each computed workgroup, the number of workgroups that it stands for."""
        return self.weights(self.loops, self.loops + BASE - 1).reshape(-1)

    def first_active(self, values: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """The values and activity [workgroups, threads] in the iteration with the most active threads."""
        shape = self.shape
        full = np.broadcast_to(values, shape).reshape(-1, *shape[-BASE:])
        if self.mask is None:
            return full[0], np.ones(shape[-BASE:], np.bool_)
        active = np.broadcast_to(self.mask, shape).reshape(full.shape)
        chosen = int(active.sum(axis=(1, 2)).argmax())
        return full[chosen], active[chosen]
