"""Prepares the streams of this process, so that every text can be written to them."""

from __future__ import annotations

import codecs
import json
import os
import sys
import warnings

from nearfar.errors import NearfarWarning

PLAIN = {
    "→": "->",
    "…": "...",
    "–": "-",
    "—": "-",
    "’": "'",
    "“": '"',
    "”": '"',
    "›": ">",
    "×": "x",
}
"""Replacements for characters of our own texts where an encoding lacks them (Windows in a pipe; LC_ALL=C)."""
HANDLER = "nearfar-plain"
_PYTHONS = warnings.formatwarning


def prepare() -> None:
    """Make every text writable, and replace closed streams, for which Python has None."""
    codecs.register_error(HANDLER, _plain)
    warnings.formatwarning = _noted
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the end)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)


def _noted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of our own as a sentence, others as Python does."""
    if issubclass(category, NearfarWarning):
        return f"note: {message}\n"
    return _PYTHONS(message, category, filename, lineno, line)


def nobody_reads() -> None:
    """Discard further output to stdout: Python's flush at the end would fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


def print_json(value: object, indent: int | None = 1) -> None:
    """Print a value as JSON; characters that the encoding lacks become escapes."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(value, indent=indent, ensure_ascii=not unicode))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end
