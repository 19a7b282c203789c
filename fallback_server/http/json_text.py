"""Reads a body as strict JSON: no NaN, no half surrogate pairs, no deep nesting. Errors say where the body is
wrong and what it has there.
"""

from __future__ import annotations

import math
from typing import Any

from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.json_words import TOO_DEEP, read_json

_LOOKED_INTO = (dict, list, float)


def parsed(body: bytes, depth: int) -> Any:
    """Return the value of a body. Raises ApiError with 400 for invalid JSON, and for lists and objects that
    are nested more than `depth` levels deep.
    """
    try:
        data = read_json(body)
    except ValueError as error:
        said = str(error)
        raise _invalid(_deep(depth) if said == TOO_DEEP else f"the body is not valid JSON: {said}") from error
    _check_nest(data, depth)
    return data


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, None, "invalid_json")


def _deep(depth: int) -> str:
    return f"the body is nested more than {depth} levels deep"


def _check_nest(data: Any, depth: int) -> None:
    """Raise ApiError for data that is nested too deeply, or has numbers that JSON cannot represent
    (1e999).
    """
    level = [data]
    for _ in range(depth + 1):
        if any(type(item) is float and not math.isfinite(item) for item in level):
            raise _invalid("the body has a number that is too large")
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            # token ids, of which a body may have a million, are none of these types
            if type(child) in _LOOKED_INTO
        ]
        if not level:
            return
    raise _invalid(_deep(depth))
