"""What a code generator asks of the cache for parts of a program, such as the object file of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Keep(Protocol):
    """A cache that outlives a build."""

    def __call__(self, make: Callable[[], bytes], /, *decides: object) -> bytes:
        """Give the kept bytes of these values, or make and keep them.

        `decides`: everything that the bytes depend on, as values that build/program/fingerprint.py takes; a
        function stands for the code of its module and of all modules that it imports.
        """
