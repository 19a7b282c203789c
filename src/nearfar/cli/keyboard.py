"""Reads single keys, for views that refresh until somebody ends them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK = 0.05
"""Seconds between two checks for a key on Windows, whose consoles cannot be waited for."""

Pressed = Callable[[float], str]
"""Function that waits for the given seconds or until a key is pressed; gives the key, empty if none."""


@contextmanager
def keyboard() -> Iterator[Pressed]:
    """Read keys as they are pressed, without echo. Ctrl-C still raises KeyboardInterrupt. Without a terminal
    the function only waits.
    """
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
    # an empty read means that the terminal is gone
    return os.read(terminal, 1).decode("latin-1") or _none(seconds)


def _of_console(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if sys.platform == "win32":
            import msvcrt

            if msvcrt.kbhit():
                return msvcrt.getwch()
        time.sleep(LOOK)
    return ""
