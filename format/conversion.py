"""Typed records as JSON, and checked JSON as typed records."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from nearfar.step.model import field_types


def plain(value: Any) -> Any:
    """Convert records to JSON; fields that have their default are left out."""
    if dataclasses.is_dataclass(value):
        given = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
        return {
            name: plain(item)
            for name, item, default in given
            if default is dataclasses.MISSING or item != default
        }
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def record(kind: Any, value: Any) -> Any:
    """Convert checked JSON to the annotated type: records, tuples, dictionaries, optional values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = field_types(typing.cast(type, kind))
        return typing.cast(Any, kind)(
            **{key: record(hints[key], value[key]) for key in hints if key in value}
        )
    if origin is tuple:
        return tuple(record(arguments[0], item) for item in value)
    if origin is dict and arguments[1] is not Any:
        return {key: record(arguments[1], item) for key, item in value.items()}
    if origin in (types.UnionType, typing.Union) and value is not None:
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return (
            record(inner[0], value) if len(inner) == 1 else tuple(value) if isinstance(value, list) else value
        )
    return float(value) if kind is float else value
