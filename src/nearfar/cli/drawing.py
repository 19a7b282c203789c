"""What stdout is: a person's terminal, or not."""

from __future__ import annotations

import sys

from rich.console import Console


def is_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout.isatty()


def draws() -> bool:
    """Whether stdout is a terminal that can redraw what it shows."""
    return is_terminal() and not Console().is_dumb_terminal
