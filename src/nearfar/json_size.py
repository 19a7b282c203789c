"""The size of a value as limits count it."""

from __future__ import annotations

import json
from typing import Any


def json_bytes(value: Any) -> int:
    """Return the bytes of a value as JSON in UTF-8 without blanks, as JavaScript's JSON.stringify writes it.

    Raises TypeError, ValueError or RecursionError for a value that is not JSON.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return len(text.encode(errors="backslashreplace"))  # half of a surrogate pair, written as its escape
