"""What stdout is: a person's terminal, or not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


def is_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout.isatty()


def draws() -> bool:
    """Whether stdout is a terminal that can redraw what it shows."""
    return is_terminal() and not Console().is_dumb_terminal


@contextmanager
def while_read() -> Iterator[None]:
    """Ends in peace where the reader of a pipe has seen enough."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end
