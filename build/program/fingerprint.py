"""What a compiled program depends on, as one digest: what it is made of, what makes it, with which tools."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from types import FunctionType
from typing import Any

import tvm

_MAKERS = ("build", "format", "step", "targets")
"""Sub-packages of nearfar whose source decides what is compiled; more than needed, so that none lacks."""
_SUFFIXES = (".py", ".c", ".h")
_TOOLS = ("apache-tvm", "apache-tvm-ffi", "numpy", "ziglang")


def fingerprint(*values: object) -> str:
    """SHA-256, in hexadecimal, of the values' content and of all that would compile them.

    The same in every process; another where a value, a source of `_MAKERS`, a version of a tool or Python's
    differs. TypeError where a value has no content that could be told (an address, an open file).
    """
    told = json.dumps([_content(value) for value in values])
    return hashlib.sha256(f"{_makers()}\n{told}".encode()).hexdigest()


@functools.cache
def _makers() -> str:
    """Sources and versions, which do not change while a process runs."""
    digest = hashlib.sha256()
    for name in _MAKERS:
        for path, data in _sources(resources.files(f"nearfar.{name}"), name):
            digest.update(f"{path} {len(data)}\n".encode() + data)
    versions = [f"{tool} {_version(tool)}" for tool in _TOOLS]
    return "\n".join(
        [digest.hexdigest(), sys.version, *versions, str(tvm.support.libinfo().get("GIT_COMMIT_HASH"))]
    )


def _sources(folder: Traversable, name: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for each in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{name}/{each.name}"
        if each.is_dir():
            found += _sources(each, path)
        elif each.name.endswith(_SUFFIXES):
            found.append((path, each.read_bytes()))
    return found


def _version(tool: str) -> str:
    try:
        return metadata.version(tool)
    except metadata.PackageNotFoundError:
        return "none"


def _content(value: Any) -> Any:
    """A value as JSON that tells apart what differs: by type too, since 1 == 1.0 == True."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Mapping):
        return ["mapping", [[_content(key), _content(item)] for key, item in value.items()]]
    if isinstance(value, tuple | list):
        return ["sequence", [_content(item) for item in value]]
    if isinstance(value, type | FunctionType):
        if getattr(value, "__closure__", None):
            raise TypeError(f"{value.__qualname__} holds values of its own, which a fingerprint cannot tell")
        return ["name", f"{value.__module__}.{value.__qualname__}"]
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if dataclasses.is_dataclass(value):
        return [
            name,
            [[each.name, _content(getattr(value, each.name))] for each in dataclasses.fields(value)],
        ]
    if kind.__module__.startswith("nearfar."):
        return [name, _content(vars(value))]
    raise TypeError(f"no fingerprint of a {name}: give records, names and numbers")
