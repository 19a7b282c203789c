"""What stdout is: a person's terminal, or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from nearfar.cli.streams import nobody_reads

_WIDE = 10_000


def is_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout.isatty()


def draws() -> bool:
    """Whether stdout is a terminal that can redraw what it shows."""
    return is_terminal() and not Console().is_dumb_terminal


def print_table(table: Table) -> None:
    """Print one that programs may read, too: as wide as its text in a pipe, cells folded on a terminal."""
    for column in table.columns:
        column.overflow = "fold"
    Console(soft_wrap=True, width=None if is_terminal() else _WIDE).print(table)


@contextmanager
def while_read() -> Iterator[None]:
    """Ends in peace where the reader of a pipe has seen enough."""
    try:
        yield
    except BrokenPipeError:
        nobody_reads()
