"""The streams of this process: what a command says can be written wherever they lead."""

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
"""What stands for signs of our own texts where an encoding lacks them (Windows in a pipe; LC_ALL=C)."""
HANDLER = "nearfar-plain"
_PYTHONS = warnings.formatwarning


def prepare() -> None:
    """Let every text be written, and every stream be there: Python has None for one that the shell closed."""
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
    """A warning of our own as a sentence; others as Python has them."""
    if issubclass(category, NearfarWarning):
        return f"note: {message}\n"
    return _PYTHONS(message, category, filename, lineno, line)


def nobody_reads() -> None:
    """Write no more: what Python flushes at its end would fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


def print_json(value: object, indent: int | None = 1) -> None:
    """Print a value as JSON; with escapes where the encoding lacks signs, so that none is lost."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(value, indent=indent, ensure_ascii=not unicode))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end
