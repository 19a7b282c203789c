"""Kernels with a symbolic number of rows: kernels for 1 and for 256 rows mostly differ only in how far their
loops go.

A kernel reads the number from the shapes of its arguments, so one function serves all these steps: codegen.py
compiles structurally equal functions once. If the number decides on the code (tiles of a matmul, tasks of
attention), there is a function for each version of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tvm import sym, tirx

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.jobs import GraphJob, Linear
from nearfar.kernels.jobs.logits import OverLogits

ROWS = "rows"
"""Name of the symbol: the number of rows of a step, or of logits that the sampler reads."""
TILE = 8
"""The least number of rows that is a whole number of tiles of a matmul on every unit (dot.tile)."""
J = TypeVar("J", bound=GraphJob)
O = TypeVar("O", bound=OverLogits)  # noqa: E741


def opened(job: J) -> J:
    """The job with a symbolic number of rows; a matmul with fewer rows than TILE stays as it is.

    Decisions on a kernel's code (tile sizes, scratch) use the original job; shapes of arguments and extents
    of loops use this one. In a matmul that gathers rows, only the number of rows that it gathers from becomes
    a symbol, and only if MAX_ROWS rows are gathered.
    """
    rows = tirx.Var(ROWS, "int32")
    symbols: dict[str, Any] = {"m": rows}
    if isinstance(job, Linear) and job.rows:
        symbols = {"x_rows": rows} if job.m == MAX_ROWS else {}
    elif isinstance(job, Linear) and job.m % TILE:
        symbols = {}
    return replace(job, **symbols)


def opened_rows(job: O) -> O:
    """The job over logits with a symbolic number of rows."""
    symbols: dict[str, Any] = {"rows": tirx.Var(ROWS, "int32")}
    return replace(job, **symbols)


def closed(shape: Sequence[Any], rows: int) -> tuple[int | None, ...]:
    """A shape with `rows` in place of the symbol; None for extents that contain other symbols."""
    return tuple(_closed(extent, rows) for extent in shape)


def whole(shape: Sequence[Any], rows: int) -> tuple[int, ...]:
    """The extents of a shape, with `rows` in place of its only symbol; AssertionError if it has others."""
    extents = closed(shape, rows)
    if None in extents:
        raise AssertionError(f"{tuple(shape)} has other symbols than {ROWS}")
    return tuple(extent for extent in extents if extent is not None)


def _closed(extent: Any, rows: int) -> int | None:
    if isinstance(extent, int | tirx.IntImm):
        return int(extent)
    analyzer = sym.Analyzer()
    for var in tirx.analysis.undefined_vars(extent):
        if var.name == ROWS:
            analyzer.bind(var, tirx.IntImm("int32", rows))
    value = analyzer.simplify(extent)
    return int(value) if isinstance(value, tirx.IntImm) else None
