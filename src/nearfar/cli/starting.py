"""Handles Ctrl-C while the command line is being imported, which can take seconds: it prints no traceback."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

_STATUS = 130  # CTRL_C of interruptible.py, which is imported later

_before: Any = None


def _end(*_: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(_STATUS)


def done() -> None:
    """Make Ctrl-C an exception again after the imports; the command catches it."""
    if _before is not None:
        signal.signal(signal.SIGINT, _before)


if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    _before = signal.signal(signal.SIGINT, _end)
