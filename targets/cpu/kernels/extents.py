"""Rows as a symbol: what kernels of a job for 1 row or 256 mostly differ in is how far their loops go.

Such a kernel reads the number from the shapes of its arguments, so that it is one function for all of these
steps: codegen.py compiles what is structurally equal once. Where the number decides on the code (the tiles of
a matmul, the tasks of attention), there is a function for each such code.
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
"""The symbol's name: of a step how many rows it has, of a sampler how many it draws for."""
TILE = 8
"""Rows that are whole tiles of a matmul on every unit (dot.tile)."""
J = TypeVar("J", bound=GraphJob)
O = TypeVar("O", bound=OverLogits)  # noqa: E741


def opened(job: J) -> J:
    """The job with its rows as a symbol; not a matmul's of fewer rows than are whole tiles.

    What decides on the kernel's code (tile sizes, scratch) is computed from the job as it was given; shapes
    of arguments and extents of loops from this one. Of a matmul that gathers its rows only those that it
    gathers from are a symbol, where it has as many as there can be.
    """
    rows = tirx.Var(ROWS, "int32")
    symbols: dict[str, Any] = {"m": rows}
    if isinstance(job, Linear) and job.rows:
        symbols = {"x_rows": rows} if job.m == MAX_ROWS else {}
    elif isinstance(job, Linear) and job.m % TILE:
        symbols = {}
    return replace(job, **symbols)


def opened_rows(job: O) -> O:
    """The job over rows of logits with an open number of rows, however few."""
    symbols: dict[str, Any] = {"rows": tirx.Var(ROWS, "int32")}
    return replace(job, **symbols)


def closed(shape: Sequence[Any], rows: int) -> tuple[int | None, ...]:
    """A shape with so many rows for the symbol; None for extents of which other symbols are a part."""
    return tuple(_closed(extent, rows) for extent in shape)


def whole(shape: Sequence[Any], rows: int) -> tuple[int, ...]:
    """The extents of a shape whose only symbol is the number of rows."""
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
