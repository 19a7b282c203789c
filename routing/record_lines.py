"""Reads files of JSON lines that people edit or that other programs write: decision records and outcomes.

Every fault is a RequestError that names the file, the line, the field and the value.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from nearfar.errors import RequestError

KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
"""What messages call JSON's kinds of values."""


@dataclass(frozen=True)
class RecordLine:
    """One object of a file. `path` and `number` say where it is. The name of a field of a field has a dot:
    `outcome.ttft`.
    """

    path: Path
    number: int
    data: dict[str, Any]

    def wrong(self, message: str) -> Never:
        """Raise RequestError about this line."""
        raise RequestError(f"{self.path}, line {self.number}: {message}", "records")

    def get(self, name: str) -> Any:
        """The value of a field; None if the field, or an object around it, is missing."""
        found: Any = self.data
        *outer, last = name.split(".")
        for at, each in enumerate(outer):
            found = found.get(each)
            if found is None:
                return None
            if not isinstance(found, dict):
                self.must(".".join(outer[: at + 1]), "an object", found)
        return found.get(last)

    def of_kind(self, name: str, kind: type) -> Any:
        """The value of a field of one of KINDS; None if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, kind):
            self.must(name, KINDS[kind], value)
        return value

    def number_of(self, name: str, least: float = -math.inf, most: float = math.inf) -> float | None:
        """The value of a field that is a finite number in these limits; None if it is missing."""
        value = self.get(name)
        return None if value is None else self._number(name, value, least, most)

    def rows(self, name: str, width: int) -> tuple[tuple[float, ...], ...]:
        """The value of a field that is a list of lists of `width` finite numbers; empty if it is missing."""
        rows = self.of_kind(name, list) or []
        for at, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != width:
                self.must(f"{name}.{at}", f"a list of {width} numbers", row)
        return tuple(
            tuple(self._number(f"{name}.{at}.{place}", each) for place, each in enumerate(row))
            for at, row in enumerate(rows)
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """The value of a field that is a list of finite numbers; empty if it is missing."""
        found = self.of_kind(name, list) or []
        return tuple(self._number(f"{name}.{at}", each) for at, each in enumerate(found))

    def _number(self, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max or not least <= value <= most:
            limits = f" from {least:g} to {most:g}" if math.isfinite(most) else ""
            limits = limits or (f" of at least {least:g}" if math.isfinite(least) else "")
            self.must(name, f"a number{limits}", value)
        return float(value)

    def must(self, name: str, be: str, value: Any) -> Never:
        """Raise RequestError: the field must be something else."""
        self.wrong(f"{name} must be {be}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A value for a message; half of a surrogate pair is written as its escape."""
    text = json.dumps(value, ensure_ascii=False)[:80]
    return text.encode(errors="backslashreplace").decode()


def read_lines(path: Path, needed: Seq[str], of: str) -> Iterator[RecordLine]:
    """Yield the objects of a file; blank lines are skipped. `needed`: fields that each must have. `of`: what
    a line is, for messages.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _line(path, number, raw, needed, of)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}", "records") from error


def _line(path: Path, number: int, raw: bytes, needed: Seq[str], of: str) -> RecordLine:
    where = RecordLine(path, number, {})
    try:
        data = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        where.wrong(
            f"byte {error.start + 1} is 0x{raw[error.start]:02x}, which is not UTF-8: save the file as UTF-8"
        )
    except (ValueError, RecursionError) as error:
        where.wrong(f"this is not JSON ({error or 'nested too deeply'}); {of} is one JSON object a line")
    if not isinstance(data, dict):
        where.wrong(f"{of} must be an object, not {_shown(data)}")
    if missing := [name for name in needed if data.get(name) is None]:
        where.wrong(f"the field {missing[0]} is missing: {of} has {', '.join(needed)}")
    return RecordLine(path, number, data)
