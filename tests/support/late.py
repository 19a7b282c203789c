"""Modules that are imported when a test first uses them, not when the tests are collected.

Each process of a test run collects all tests. torch, transformers, mlx_lm and openai cost it 8 CPU seconds,
whether or not it runs one test that needs them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """Stands for a module: reads its attributes, and imports it for the first of them."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        # pytest and its plugins look for marks of their own on whatever a test module holds.
        if name.startswith("_") or name == "pytestmark":
            raise AttributeError(name)
        return getattr(import_module(self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"give monkeypatch.setattr the name {self._name}.{name}, as a string")

    def __repr__(self) -> str:
        return f"late({self._name!r})"


def late(name: str, *needs: str, reason: str = "") -> Any:
    """The module `name`, imported at first use. If its package or one of the packages `needs` is not
    installed, the test module is skipped, as by `pytest.importorskip`.
    """
    for package in (name.partition(".")[0], *needs):
        if find_spec(package) is None:
            pytest.skip(reason or f"{package} is not installed", allow_module_level=True)
    return Late(name)
