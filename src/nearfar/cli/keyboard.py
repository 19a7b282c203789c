"""Single keys, for views that go on until somebody ends them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK = 0.05
"""Seconds between two looks for a key on Windows, whose consoles cannot be waited for."""

Pressed = Callable[[float], str]
"""Waits for so many seconds, or until a key is pressed: which one, empty if none."""


@contextmanager
def keyboard() -> Iterator[Pressed]:
    """Keys as they are pressed, unseen. Ctrl-C stays what it is. Without a terminal it only waits."""
    if not sys.stdin.isatty():
        yield _none
    elif sys.platform == "win32":
        yield _of_console
    else:
        import termios
        import tty

        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        tty.setcbreak(terminal)
        try:
            yield lambda seconds: _of_terminal(terminal, seconds)
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _none(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _of_terminal(terminal: int, seconds: float) -> str:
    import select

    if not select.select([terminal], [], [], seconds)[0]:
        return ""
    return os.read(terminal, 1).decode("latin-1") or _none(seconds)  # nothing: the terminal is gone


def _of_console(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if sys.platform == "win32":
            import msvcrt

            if msvcrt.kbhit():
                return msvcrt.getwch()
        time.sleep(LOOK)
    return ""
