"""Structured logs with a request id, and the audit log."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that the current task serves."""

log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(
            entry, default=str
        )  # ASCII: some control characters are not JSON's, but a terminal's


class TextFormatter(logging.Formatter):
    """For a terminal. What came from outside can neither end a line nor speak to the terminal, nor look
    like a field.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields = " ".join(f"{name}={_value(value)}" for name, value in getattr(record, "fields", {}).items())
        current = request_id.get()
        parts = [
            time.strftime("%H:%M:%S"),
            record.levelname.lower(),
            _line(record.getMessage()),
            fields,
            current or "",
        ]
        text = " ".join(part for part in parts if part)
        if not record.exc_info:
            return text
        return "\n  ".join((text, *map(_line, self.formatException(record.exc_info).split("\n"))))


_PLAIN = re.compile(r"[\w./:@%+,~-]+")


def _value(value: object) -> str:
    """A field's value as it is, or in quotes where that would mislead."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _line(text: str) -> str:
    """The text with what is not printable escaped: one line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def set_up(form: Literal["text", "json"], level: str) -> None:
    """Send all logs of this process to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@dataclass(frozen=True)
class AuditEntry:
    """Who asked what of which model, and what came of it. `prompt` and the fields after it stay None unless
    text is asked for: of each answer its text, and where there are any its reasoning and its tool calls.
    """

    request_id: str
    key: str
    endpoint: str
    model: str
    status: int
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    prompt: Any = None
    answer: list[str] | None = None
    reasoning: list[str] | None = None
    tool_calls: list[list[dict[str, Any]]] | None = None


class AuditLog:
    """JSON lines, appended. `text`: also what was said. A disk that is full costs entries, not requests.

    A file that is made is its owner's alone to read; one that is there keeps the rights that it was given.
    """

    def __init__(self, path: Path, text: bool) -> None:
        self.text = text
        self._file = os.fdopen(os.open(path, _APPEND, 0o600), "a", encoding="utf-8", buffering=1)

    def write(self, entry: AuditEntry) -> None:
        """Append an entry."""
        record = {name: value for name, value in asdict(entry).items() if value is not None}
        record["time"] = time.time()
        try:
            self._file.write(json.dumps(record) + "\n")
        except (OSError, ValueError) as error:
            log.error("the audit log cannot be written: %s", error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
