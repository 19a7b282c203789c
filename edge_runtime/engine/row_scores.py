"""Rows of a step whose logits are read: which rows a step has room for, and what their logits say."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.engine.requests import RowScores, ScoredRow
from nearfar.format.sizes import TOP_LOGPROBS


def scored_rows(rows: Seq[ScoredRow], start: int, count: int, room: int) -> tuple[int, tuple[ScoredRow, ...]]:
    """The rows of `rows` that a chunk of up to `count` positions from `start` on scores, with at most `room`
    rows of logits, and the positions that the chunk then has.

    It ends before a needed row for which there is no room. Optional rows share what room is left evenly.
    """
    if not rows:
        return count, ()
    needed = [row for row in rows if not row.optional and start <= row.position < start + count]
    if len(needed) > room:
        count = needed[room].position - start
        needed = needed[:room]
    optional = [row for row in rows if row.optional and start <= row.position < start + count]
    spare = room - len(needed)
    kept = optional[:: -(-len(optional) // spare)] if spare and optional else []
    return count, tuple(sorted([*needed, *kept], key=lambda row: row.position))


def row_scores(logits: npt.NDArray[Any], rows: Iterable[ScoredRow]) -> tuple[RowScores, ...]:
    """The scores of rows, from their logits, float32 [R, vocab]. A row that is not finite has only NaN."""
    return tuple(_scores(values.astype(np.float64), row) for values, row in zip(logits, rows, strict=True))


def _scores(logits: npt.NDArray[np.float64], row: ScoredRow) -> RowScores:
    if not np.isfinite(logits).all():
        return RowScores((float("nan"),) * len(row.tokens), (float("nan"),))
    most = min(TOP_LOGPROBS, len(logits))
    likeliest = np.sort(np.argpartition(logits, -most)[-most:])
    likeliest = likeliest[np.argsort(-logits[likeliest], kind="stable")]  # of equal ones the first id
    best = float(logits[likeliest[0]])
    log_sum = best + float(np.log(np.exp(logits - best).sum()))
    found = tuple(float(logits[token]) - log_sum for token in row.tokens)
    return RowScores(found, tuple((logits[likeliest] - log_sum).tolist()), tuple(likeliest.tolist()))
