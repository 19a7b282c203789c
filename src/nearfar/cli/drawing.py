"""Checks whether stdout is a terminal, and prints tables accordingly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from nearfar.cli.streams import nobody_reads

_WIDE = 10_000


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def draws() -> bool:
    """Whether stdout is a terminal that can redraw what it shows."""
    return is_terminal() and not Console().is_dumb_terminal


def print_table(table: Table) -> None:
    """Print a table that programs may also read: as wide as its text in a pipe, with wrapped cells on a
    terminal.
    """
    for column in table.columns:
        column.overflow = "fold"
    Console(soft_wrap=True, width=None if is_terminal() else _WIDE).print(table)


@contextmanager
def while_read() -> Iterator[None]:
    """A context that ends quietly when the reader closes the pipe."""
    try:
        yield
    except BrokenPipeError:
        nobody_reads()
