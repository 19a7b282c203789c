"""An executor that fails at one chosen call, and checks its caller: after the failure it may only
be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from nearfar.edge_runtime.executors.base import Array, Executor
from nearfar.errors import DeviceError


class Faults:
    """Counts the calls of all executors made with it, and fails call `at` (from 0), once; None: no call
    fails.
    """

    def __init__(self, at: int | None, error: type[Exception] = DeviceError) -> None:
        self.at, self.error = at, error
        self.calls: list[str] = []
        self.misused: list[str] = []
        """Calls of an executor that had already failed."""

    @property
    def happened(self) -> bool:
        """Whether the failure has happened."""
        return self.at is not None and len(self.calls) > self.at

    def call(self, name: str, owner: Faulty) -> None:
        """Count a call; raises an error if it is the one to fail."""
        if owner.broken:
            self.misused.append(name)
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            owner.broken = True
            raise self.error(f"injected at call {self.at}: {name}")


class Faulty:
    """See Executor: every call but `close` and `memory_used` may be the one that fails."""

    def __init__(self, inner: Executor, faults: Faults) -> None:
        self.inner, self.faults, self.broken, self.closed = inner, faults, False, False

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def precision(self) -> str:
        return self.inner.precision

    @property
    def program_name(self) -> str:
        return self.inner.program_name

    def write(self, buffer: str, data: Array, row: int = 0, column: int = 0) -> None:
        self.faults.call(f"write {buffer}", self)
        self.inner.write(buffer, data, row, column)

    def prepare(self, function: str, size: int, later: bool = False) -> Sequence[Future[Any]]:
        return self.inner.prepare(function, size, later)

    def run(self, function: str, size: int) -> None:
        self.faults.call(f"run {function} {size}", self)
        self.inner.run(function, size)

    def fetch(self, buffer: str, rows: int) -> Callable[[], Array]:
        self.faults.call(f"fetch {buffer}", self)
        read = self.inner.fetch(buffer, rows)

        def wait() -> Array:
            self.faults.call(f"read {buffer}", self)
            return read()

        return wait

    def copy_page(self, group: int, source: int, target: int) -> None:
        self.faults.call("copy_page", self)
        self.inner.copy_page(group, source, target)

    def read_pages(self, group: int, pages: Sequence[int]) -> dict[str, Array]:
        self.faults.call("read_pages", self)
        return self.inner.read_pages(group, pages)

    def write_pages(self, group: int, pages: Sequence[int], content: Mapping[str, Array]) -> None:
        self.faults.call("write_pages", self)
        self.inner.write_pages(group, pages, content)

    def memory_used(self) -> int:
        return self.inner.memory_used()

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
