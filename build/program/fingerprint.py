"""One digest of everything that a compiled program depends on: its input, the code that makes it, and the
tools.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from types import FunctionType
from typing import Any

import tvm

from nearfar.build.program.makers import makers_digest

_TOOLS = ("apache-tvm", "apache-tvm-ffi", "numpy", "ziglang")


def fingerprint(*values: object) -> str:
    """SHA-256, in hexadecimal, of the values' content, of the code that defines their classes and functions
    (makers.py), and of the versions of the tools.

    It is the same in every process, and differs where a value, a source file or a version of a tool or of
    Python differs. Raises TypeError for a value without comparable content (an address, an open file), or
    defined by code outside nearfar.
    """
    modules: set[str] = set()
    told = json.dumps([_content(value, modules) for value in values])
    made = f"{makers_digest(frozenset(modules))}\n{_tools()}\n{told}"
    return hashlib.sha256(made.encode()).hexdigest()


@functools.cache
def _tools() -> str:
    """Versions of the tools, read once: they do not change while a process runs."""
    versions = [f"{tool} {_version(tool)}" for tool in _TOOLS]
    return "\n".join([sys.version, *versions, str(tvm.support.libinfo().get("GIT_COMMIT_HASH"))])


def _version(tool: str) -> str:
    try:
        return metadata.version(tool)
    except metadata.PackageNotFoundError:
        return "none"


def _content(value: Any, modules: set[str]) -> Any:
    """A value as JSON that distinguishes all different values, also by type, since 1 == 1.0 == True. The
    modules of all classes and functions in it are added to `modules`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Mapping):
        return ["mapping", [[_content(key, modules), _content(item, modules)] for key, item in value.items()]]
    if isinstance(value, tuple | list):
        return ["sequence", [_content(item, modules) for item in value]]
    if isinstance(value, type | FunctionType):
        if getattr(value, "__closure__", None):
            raise TypeError(f"{value.__qualname__} holds values of its own, which a fingerprint cannot cover")
        return ["name", _name(value, modules)]
    kind = type(value)
    name = _name(kind, modules)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [name, [[each.name, _content(getattr(value, each.name), modules)] for each in fields]]
    if kind.__module__.startswith("nearfar."):
        return [name, _content(vars(value), modules)]
    raise TypeError(f"no fingerprint of a {name}: give records, names and numbers")


def _name(code: type | FunctionType, modules: set[str]) -> str:
    """A class's or function's name; its module is added to `modules`."""
    modules.add(code.__module__)
    name = f"{code.__module__}.{code.__qualname__}"
    if not code.__module__.startswith(("nearfar.", "builtins")):
        raise TypeError(f"{name} is not code of nearfar, so a fingerprint cannot cover its source")
    return name
