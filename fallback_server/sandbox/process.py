"""The parent's side: a pool of child processes, one job at a time each, killed when a job takes too long."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nearfar.children import child_environment
from nearfar.errors import EngineError, OverloadError, RequestError
from nearfar.fallback_server import framing

SandboxTask = dict[str, Any]


@dataclass(frozen=True)
class ChildSpec:
    """A kind of child process. `module` is run with `settings` as JSON; times are in seconds. At most `count`
    children run, started when needed.

    `timeout` bounds the processor time of one job, so that a job costs the same on a busy machine as on a
    quiet one; `patience` bounds its time by the clock. Where the system cannot bound the processor time of a
    process (Windows), `timeout` bounds the time by the clock. `start_timeout` covers imports and loading;
    `waiting` bounds the jobs that wait for a free child; `memory` is the limit in bytes.
    """

    module: str
    settings: dict[str, Any]
    what: str
    count: int = 1
    timeout: float = 2.0
    patience: float = 60.0
    start_timeout: float = 60.0
    waiting: int = 64
    memory: int = 4 << 30


ENDING = "the server is shutting down"
BOUNDED = hasattr(signal, "setitimer")
"""Whether children bound the processor time of a job themselves (see `sandbox/child.py`)."""
TOO_LONG = -signal.SIGPROF if BOUNDED else None
"""Exit status of a child whose job took all its processor time."""


class ChildPool:
    """Runs jobs in children. A job that takes too long costs its child, and other jobs nothing but time.

    A caller may leave at any moment: its job runs to its end and the answer is dropped. A child takes a
    second or more to start, so only a job that takes too long may cost one: otherwise a client that hung up
    four times a second would keep all others waiting for new children.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.kills = 0
        self._children = [_Child(spec) for _ in range(spec.count)]
        # last in, first out, so that running processes are used first
        self._free: asyncio.LifoQueue[_Child] = asyncio.LifoQueue()
        for child in self._children:
            self._free.put_nowait(child)
        self._waiting = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._closed = False

    async def warm(self, count: int | None = None) -> None:
        """Start `count` children (all by default), so that the first job does not wait for the start.

        A job that comes meanwhile waits for one of these: another child would start later and delay both.
        """
        free = [self._free.get_nowait() for _ in range(self._free.qsize())]
        chosen = free[: len(free) if count is None else count]
        try:
            await asyncio.gather(*(child.ready() for child in chosen))
        finally:
            # back in their order, because the queue is last in, first out
            for child in (*free[len(chosen) :], *chosen):
                self._free.put_nowait(child)

    async def run(self, job: SandboxTask) -> SandboxTask:
        """Return the child's answer. Raises RequestError if the child rejects the job or the job takes too
        long, OverloadError if too many jobs wait.
        """
        if self._waiting >= self.spec.waiting:
            raise OverloadError(f"too many requests wait for their {self.spec.what}; try again later", 1.0)
        self._waiting += 1
        try:
            child = await self._free.get()
        finally:
            self._waiting -= 1
        if self._closed:
            self._free.put_nowait(child)  # for the next job that waits
            raise EngineError(ENDING)
        answer: asyncio.Future[SandboxTask] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._work(child, job, answer))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        found = await answer
        if "error" in found:
            raise RequestError(found["error"], found.get("param"))
        return found

    async def close(self) -> None:
        """End all children. Waiting callers get EngineError."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await asyncio.gather(*(child.kill() for child in self._children))

    async def _work(self, child: _Child, job: SandboxTask, answer: asyncio.Future[SandboxTask]) -> None:
        """Run one job on its child and set its answer, whether the caller still waits or not."""
        try:
            made = await self._on(child, job)
            if not answer.done():
                answer.set_result(made)
        except asyncio.CancelledError:
            if not answer.done():
                answer.set_exception(EngineError(ENDING))
            raise
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
            if not self._closed:
                # the process is started now, so that the next job need not wait for it
                with suppress(EngineError, OSError):
                    await child.ready()
        finally:
            self._free.put_nowait(child)

    async def _on(self, child: _Child, job: SandboxTask) -> SandboxTask:
        spec = self.spec
        patience = max(spec.patience, spec.timeout) if BOUNDED else spec.timeout
        try:
            await child.ready()
            async with asyncio.timeout(patience):
                return await child.ask(job)
        except TimeoutError:
            self.kills += 1
            await child.kill()
            if BOUNDED:  # the job used less processor time than it may, so the machine is too busy for it
                raise OverloadError(
                    f"the {spec.what} had too little processor time for {patience:g} seconds, because "
                    "the server is too busy; try again later",
                    1.0,
                ) from None
            raise RequestError(
                f"the {spec.what} took longer than {spec.timeout:g} seconds; make it simpler"
            ) from None
        except (EOFError, ConnectionError, BrokenPipeError):
            self.kills += 1
            if await child.end() == TOO_LONG:
                raise RequestError(
                    f"the {spec.what} took more than {spec.timeout:g} seconds of processor time; make it "
                    "simpler"
                ) from None
            raise RequestError(
                f"the {spec.what} failed: its process ended, most likely for want of memory; make it simpler"
            ) from None


class _Child:
    """One process. It is started when needed, and again after it was killed."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0

    async def ready(self) -> None:
        """Start the process if it does not run."""
        if self._process is not None and self._process.returncode is None:
            return
        spec = self._spec
        settings = json.dumps({**spec.settings, "memory": spec.memory, "processor_seconds": spec.timeout})
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", spec.module, settings,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C is for the parent, from the child's first moment on
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

    async def ask(self, job: SandboxTask) -> SandboxTask:
        """Send a job and read its answer. Each job has a number, so that an answer never goes to another
        job.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked += 1
        data = json.dumps({"number": self._asked, "job": job}).encode()
        self._process.stdin.write(framing.framed(data))
        await self._process.stdin.drain()
        answer = await self._read()
        if answer["number"] != self._asked:
            raise EOFError
        found: SandboxTask = answer["answer"]
        return found

    async def end(self) -> int | None:
        """Return the exit status of a process whose output has ended; kill it if it runs a second later.

        A signal before its end is noticed would hide the status (asyncio then reports 255).
        """
        process = self._process
        if process is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)
        await self.kill()
        return None if process is None else process.returncode

    async def kill(self) -> None:
        """End the process now."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            await process.wait()

    async def _read(self) -> SandboxTask:
        assert self._process is not None
        assert self._process.stdout is not None
        message = await framing.read(self._process.stdout)
        if message is None:
            raise EOFError
        answer: SandboxTask = json.loads(message)
        return answer
