"""The rows of a step as the graph takes them: sequences of equally many consecutive tokens, a batch a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """Sequences that are computed together, each with `count` tokens more.

    `rows` int [B, count]: the step's rows; `slots`, `starts` int [B]: whose, and how many positions each has
    behind it; `keep`: of so many last tokens logits are wanted, at least one.
    """

    rows: Array
    slots: Array
    starts: Array
    keep: int

    @property
    def count(self) -> int:
        """Tokens of each sequence."""
        return int(self.rows.shape[1])

    @property
    def total(self) -> int:
        """Positions of the longest sequence, with the new ones."""
        return int(self.starts.max()) + self.count

    @property
    def single(self) -> bool:
        """Whether it is one token of each sequence."""
        return self.count == 1


def batches(positions: Array, slots: Array, wanted: Sequence[int]) -> list[Batch]:
    """The batches of a step with `positions` and `slots` [M], −1 marks padding; `wanted`: rows with logits.

    One token of each sequence is one batch, whatever their lengths. Several tokens behind a past, which
    ONNX Runtime computes for one sequence alone, are one each.
    """
    live = np.flatnonzero(positions >= 0)
    if not len(live):
        return []
    at, slot = positions[live], slots[live]
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(slot) != 0) | (np.diff(live) != 1)) + 1
    spans = np.split(live, breaks)
    alone = [span for span in spans if len(span) == 1]
    groups = [np.stack(alone)] if alone else []
    groups += [span[None] for span in spans if len(span) > 1]
    asked = set(wanted)
    made = []
    for rows in groups:
        first = next((i for i, row in enumerate(rows[0].tolist()) if row in asked), rows.shape[1] - 1)
        keep = 1 if rows.shape[1] == 1 else rows.shape[1] - first
        made.append(Batch(rows, slots[rows[:, 0]], positions[rows[:, 0]].astype(np.int64), keep))
    return made
