"""The rows of a step as the graph takes them: batches of sequences with equally many consecutive tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SpanBatch:
    """Sequences that are computed together, each with `count` new tokens.

    `rows` int [B, count]: the step's rows. `slots`, `starts` int [B]: the slot of each sequence, and its
    positions so far. `keep`: the number of last tokens whose logits are needed, at least one.
    """

    rows: Array
    slots: Array
    starts: Array
    keep: int

    @property
    def count(self) -> int:
        """New tokens of each sequence."""
        return int(self.rows.shape[1])

    @property
    def total(self) -> int:
        """Positions of the longest sequence, including the new ones."""
        return int(self.starts.max()) + self.count

    @property
    def single(self) -> bool:
        """Whether the batch has one token for each sequence."""
        return self.count == 1


def batches(positions: Array, slots: Array, wanted: Sequence[int]) -> list[SpanBatch]:
    """Divide a step with `positions` and `slots` [M] (−1 marks padding) into batches; `wanted`: rows with
    logits.

    Sequences with one token share a batch, whatever their lengths. Sequences with several tokens after a past
    are a batch each: ONNX Runtime computes these for one sequence at a time.
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
        made.append(SpanBatch(rows, slots[rows[:, 0]], positions[rows[:, 0]].astype(np.int64), keep))
    return made
