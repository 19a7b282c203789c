"""Reads the events of one streamed answer: what has begun, what has ended, and what is passed on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.remote.chunks import ShapeError, StreamChunk, UsageCounts, read_chunk
from nearfar.remote.errors import FewerAnswersError, RefusedError, RemoteError, event_error, unreachable
from nearfar.remote.merging import Merger

HELD_BYTES = 64 << 10
"""Most bytes of events without a part of an answer that wait for the first part before they are passed on."""
MAX_ID = 256
"""Most characters of a server's id of an answer that are kept."""


@dataclass(frozen=True)
class Passing:
    """How events are passed on. `model`: the name that the client uses, where the server has another.
    `usage`: the client asked for the usage. `options`: the client's other options of the stream. `whole`: the
    events are merged into a whole answer.
    """

    model: str | None = None
    usage: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False


class AnswerEvents:
    """Reads the events of one call: which answers have begun and ended, and what is passed on of them."""

    def __init__(self, where: str, answers: int, chat: bool, passing: Passing | None) -> None:
        self._where, self._answers, self._chat, self._passing = where, answers, chat, passing
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._failure: Exception | None = None
        self._merger = Merger(passing.model) if passing is not None and passing.whole else None
        self._id = ""
        self._named = False
        self._held = b""  # events before the first part: until then another server may be asked

    @property
    def complete(self) -> bool:
        """Whether all answers have their finish reason."""
        return len(self._finished) == self._answers

    def read(self, found: Sequence[bytes]) -> StreamChunk:
        """Read events that came together. `check` raises the error of an invalid event, after the events
        before it were passed on.
        """
        parts: list[Piece] = []
        kept: list[bytes] = []
        usage: UsageCounts | None = None
        try:
            with failing(self._where):
                for data in found:
                    record = read_object(data)
                    chunk = self._chunk(record)
                    usage = chunk.usage or usage
                    if not self._named:
                        self._named = True
                        self._id = str(record.get("id") or "")[:MAX_ID]
                    if self._merger is not None:
                        self._merger.add(record)
                    elif self._passing is not None and self._goes_on(record, chunk):
                        kept.append(self._event(record, data, self._passing))
                    if not self.complete:  # all that can come then is the usage
                        self._begun.update(part.index for part in chunk.parts)
                        self._finished.update(part.index for part in chunk.parts if part.finish is not None)
                        parts += chunk.parts
        except (RemoteError, RefusedError) as error:
            self._failure = error
        if self._merger is not None:
            return StreamChunk(tuple(parts), usage, merger=self._merger)
        data = self._held + b"".join(kept)
        self._held = b"" if self._begun or len(data) > HELD_BYTES else data
        if self._held or not data:
            return StreamChunk(tuple(parts), usage)
        name, self._id = self._id, ""
        return StreamChunk(tuple(parts), usage, data, name)

    def check(self) -> None:
        """Raise the failure of the events read last."""
        if self._failure is not None:
            raise self._failure

    def check_end(self) -> None:
        """Raise an error where the stream has ended before its answers."""
        if self._finished and self._begun == self._finished and not self.complete:
            missing = sorted({*range(self._answers)} - self._finished)
            raise FewerAnswersError(self._where, self._answers, missing)
        if not self.complete:
            raise RemoteError(f"{self._where}: the stream ended before its answer", "cut")

    def _chunk(self, record: Mapping[str, Any]) -> StreamChunk:
        if record.get("error"):
            raise event_error(self._where, record["error"])
        chunk = read_chunk(record, chat=self._chat)
        if any(part.index >= self._answers for part in chunk.parts):
            raise ShapeError(
                f"a part of answer {max(part.index for part in chunk.parts)}, but {self._answers} were "
                "asked for"
            )
        return chunk

    def _goes_on(self, record: Mapping[str, Any], chunk: StreamChunk) -> bool:
        """Whether an event is passed on: a part of an answer, or the usage if the client asked for it."""
        assert self._passing is not None
        if record.get("choices"):
            return not self.complete
        return chunk.usage is None or self._passing.usage

    def _event(self, record: dict[str, Any], data: bytes, passing: Passing) -> bytes:
        """Return an event as it came, or with the client's name for the model."""
        if passing.model is not None:
            data = json.dumps({**record, "model": passing.model}, separators=(",", ":")).encode()
        elif b"\n" in data or b"\r" in data:
            data = json.dumps(record, separators=(",", ":")).encode()
        return b"data: " + data + b"\n\n"


def read_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    record = json.loads(text.decode())
    if not isinstance(record, dict):
        raise ShapeError(f"no object: {record!r:.80}")
    return record


@contextmanager
def failing(where: str) -> Iterator[None]:
    """Convert every failure of a server to RemoteError."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise RemoteError(f"{where}: {type(error).__name__}: {error}", "timeout") from error
    except TimeoutError as error:
        raise RemoteError(f"{where}: {error}", "timeout") from error
    except httpx.ConnectError as error:
        raise RemoteError(unreachable(where, error), "connection") from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise RemoteError(f"{where}: {type(error).__name__}: {error}", "cut") from error
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"{where}: not the shape of an answer: {error}"[:500], "shape") from error
