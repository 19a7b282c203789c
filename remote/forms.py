"""Requests that are multipart forms, as those with sound: the field that names the model is read and
replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nearfar.errors import RequestError

_BOUNDARY = re.compile(
    r"multipart/form-data\s*;\s*boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1", re.IGNORECASE
)
_NAME = re.compile(rb"^content-disposition:[^\r\n]*;\s*name=\"?([^\"\r\n;]*)", re.IGNORECASE | re.MULTILINE)
MAX_PARTS = 64


@dataclass(frozen=True)
class Form:
    """A form: its bytes, its media type, and where in the bytes the model's name is."""

    data: bytes
    type: str
    model: str
    at: int

    def renamed(self, model: str) -> Form:
        """Return the form with another name of the model."""
        end = self.at + len(self.model.encode())
        data = self.data[: self.at] + model.encode() + self.data[end:]
        return replace(self, data=data, model=model)


def read_form(data: bytes, content_type: str) -> Form:
    """Read a multipart form. Raises RequestError where it does not name exactly one model."""
    given = _BOUNDARY.fullmatch(content_type.strip())
    if given is None:
        raise RequestError("the body must be a form: send Content-Type: multipart/form-data; boundary=…")
    mark = b"--" + given[2].encode()
    parts = (b"\r\n" + data).split(b"\r\n" + mark, MAX_PARTS + 1)
    if len(parts) > MAX_PARTS + 1:
        raise RequestError(f"a form has at most {MAX_PARTS} fields")
    found: list[tuple[str, int]] = []
    at = len(parts[0]) - 2
    for part in parts[1:]:
        at += 2 + len(mark)
        head, blank, value = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if blank and name is not None and name[1] == b"model":
            found.append((_text(value), at + len(head) + len(blank)))
        at += len(part)
    if len(found) != 1:
        raise RequestError(f"the form must have one field model, not {len(found)}", "model")
    boundary = f'multipart/form-data; boundary="{given[2]}"'
    return Form(data, boundary, *found[0])


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = ""
    if not 1 <= len(text) <= 256:
        raise RequestError("model must be a name of 1 to 256 characters", "model")
    return text
