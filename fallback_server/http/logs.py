"""Structured logs with a request id, and the audit log."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from logging.handlers import QueueHandler, QueueListener
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
        )  # escaped to ASCII, because some characters that JSON leaves alone control a terminal


class TextFormatter(logging.Formatter):
    """Formats a line for a terminal. Text from outside can neither end a line, nor control the terminal, nor
    look like a field.
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
    """A field's value as it is, or in quotes where it would be ambiguous."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _line(text: str) -> str:
    """Escape unprintable characters, so that the text is one line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


BACKLOG = 10_000
"""Most lines that wait to be written; further ones are dropped."""
WRITING_SECONDS = 5.0
"""Seconds for writing the remaining lines at the end."""


class _Queued(QueueHandler):
    """Queues lines for the thread that writes them. A line is formatted here, because it names the current
    request.
    """

    listener: QueueListener | None = None

    def enqueue(self, record: logging.LogRecord) -> None:
        """See QueueHandler."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)

    def close(self) -> None:
        """Write the remaining lines. `logging` calls this when the process ends."""
        listener, self.listener = self.listener, None
        if listener is not None:
            with suppress(queue.Full):  # then the reader of the log is gone, and no message can be shown
                listener.enqueue_sentinel()
            if listener._thread is not None:
                listener._thread.join(WRITING_SECONDS)
        super().close()


def set_up(form: Literal["text", "json"], level: str) -> None:
    """Send all logs of this process to stderr in one format, by a thread, so that nothing waits for a slow
    reader.
    """
    handler = _Queued(queue.Queue(BACKLOG))
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    handler.listener = QueueListener(handler.queue, logging.StreamHandler(sys.stderr))
    handler.listener.start()
    for name in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@dataclass(frozen=True)
class AuditEntry:
    """A request and its outcome. `prompt` and the fields after it are None unless the log has text: then each
    answer's text, and its reasoning and tool calls where there are any.
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
    """An audit log of JSON lines, appended by a thread: no request waits for the disk. `text`: also log
    prompts and answers. A full or hanging disk loses entries, not requests.

    A new file is readable by its owner only; an existing one keeps its permissions.
    """

    def __init__(self, path: Path, text: bool) -> None:
        self.text = text
        self._file = os.fdopen(os.open(path, _APPEND, 0o600), "a", encoding="utf-8", buffering=1)
        self._entries: queue.Queue[tuple[float, AuditEntry] | threading.Event | None] = queue.Queue(BACKLOG)
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def write(self, entry: AuditEntry) -> None:
        """Queue an entry to be appended."""
        try:
            self._entries.put_nowait((time.time(), entry))
        except queue.Full:
            log.error("the audit log cannot be written as fast as requests come: an entry is left out")

    def flush(self) -> None:
        """Wait until all entries so far are written."""
        if self._thread.is_alive():
            self._entries.put(written := threading.Event())
            written.wait(WRITING_SECONDS)

    def close(self) -> None:
        """Write the remaining entries, and close the file."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._entries.put(None, timeout=WRITING_SECONDS)
            self._thread.join(WRITING_SECONDS)
        if not self._thread.is_alive():  # the thread still holds the file if the disk hangs
            self._file.close()

    def _write_all(self) -> None:
        while (item := self._entries.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            at, entry = item
            record = {name: value for name, value in asdict(entry).items() if value is not None}
            record["time"] = at
            try:
                self._file.write(json.dumps(record) + "\n")
            except (OSError, ValueError) as error:
                log.error("the audit log cannot be written: %s", error)
