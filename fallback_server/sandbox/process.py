"""The parent's side: a pool of child processes, one job at a time each, killed when a job takes too long."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nearfar.errors import EngineError, OverloadError, RequestError

Job = dict[str, Any]


@dataclass(frozen=True)
class ChildSpec:
    """A kind of child. `module` is run with `settings` as JSON; times are seconds. At most `count` run,
    started when needed.

    `start_timeout` covers imports and loading; `waiting` bounds the jobs that wait for a free child.
    """

    module: str
    settings: dict[str, Any]
    what: str
    count: int = 1
    timeout: float = 2.0
    start_timeout: float = 60.0
    waiting: int = 64
    memory: int = 4 << 30


class ChildPool:
    """Runs jobs in children. A job that takes too long costs its child, and nobody else anything but time."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.kills = 0
        self._children = [_Child(spec) for _ in range(spec.count)]
        self._free: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()  # those that run already first
        for child in self._children:
            self._free.put_nowait(child)
        self._waiting = 0

    async def warm(self, count: int | None = None) -> None:
        """Start all children or so many, so that the first job need not wait for that.

        A job that comes meanwhile waits for one of these: another child would begin later, and hold up both.
        """
        free = [self._free.get_nowait() for _ in range(self._free.qsize())]
        chosen = free[: len(free) if count is None else count]
        try:
            await asyncio.gather(*(child.ready() for child in chosen))
        finally:
            for child in (*free[len(chosen) :], *chosen):  # last in, first out
                self._free.put_nowait(child)

    async def run(self, job: Job) -> Job:
        """The child's answer. RequestError if it refuses the job or the job takes too long."""
        if self._waiting >= self.spec.waiting:
            raise OverloadError(f"too many requests wait for their {self.spec.what}; try again later", 1.0)
        self._waiting += 1
        try:
            child = await self._free.get()
        finally:
            self._waiting -= 1
        try:
            answer = await self._on(child, job)
        finally:
            self._free.put_nowait(child)
        if "error" in answer:
            raise RequestError(answer["error"], answer.get("param"))
        return answer

    async def close(self) -> None:
        """End all children."""
        await asyncio.gather(*(child.kill() for child in self._children))

    async def _on(self, child: _Child, job: Job) -> Job:
        try:
            await child.ready()
            async with asyncio.timeout(self.spec.timeout):
                return await child.ask(job)
        except TimeoutError:
            self.kills += 1
            await child.kill()
            raise RequestError(
                f"the {self.spec.what} took longer than {self.spec.timeout:g} seconds; make it simpler"
            ) from None
        except (EOFError, ConnectionError, BrokenPipeError):
            self.kills += 1
            await child.kill()
            raise RequestError(
                f"the {self.spec.what} failed: its process ended, most likely for want of memory; make "
                "it simpler"
            ) from None
        except asyncio.CancelledError:  # the answer would go to the next job
            await child.kill()
            raise


class _Child:
    """One process. It is started when it is needed, and again after it was killed."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def ready(self) -> None:
        """Start the process if it does not run."""
        if self._process is not None and self._process.returncode is None:
            return
        spec = self._spec
        settings = json.dumps({**spec.settings, "memory": spec.memory})
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", spec.module, settings,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
            start_new_session=True,  # Ctrl-C is for the parent, from the first moment on
        )  # fmt: skip
        try:
            async with asyncio.timeout(spec.start_timeout):
                hello = await self._read()
        except (TimeoutError, EOFError) as error:
            await self.kill()
            raise EngineError(
                f"the process for the {spec.what} does not start; see its messages above"
            ) from error
        if "error" in hello:
            await self.kill()
            raise EngineError(f"the process for the {spec.what} does not start: {hello['error']}")

    async def ask(self, job: Job) -> Job:
        """Send a job, read its answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        data = json.dumps(job).encode()
        self._process.stdin.write(len(data).to_bytes(4, "big") + data)
        await self._process.stdin.drain()
        return await self._read()

    async def kill(self) -> None:
        """End the process now."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            await process.wait()

    async def _read(self) -> Job:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
            answer: Job = json.loads(await self._process.stdout.readexactly(size))
        except asyncio.IncompleteReadError as error:
            raise EOFError from error
        return answer
