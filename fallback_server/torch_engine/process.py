"""Starts the worker process and talks to it; one object stands for one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from nearfar.children import child_environment
from nearfar.errors import CheckpointError, DeviceError, EngineError
from nearfar.fallback_server.backend import BackendInfo
from nearfar.fallback_server.torch_engine.messages import (
    FromWorker,
    Ready,
    Shutdown,
    Start,
    ToWorker,
    Unfit,
    encode,
    read,
)
from nearfar.fallback_server.torch_engine.options import TorchOptions

EXIT_SECONDS = 2.0  # seconds that a worker may take to end


class WorkerProcess:
    """A running worker. `heard` is when it last sent something (time.monotonic)."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.heard = time.monotonic()
        self.info: BackendInfo
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, path: Path, options: TorchOptions) -> WorkerProcess:
        """Start a worker and wait until its model is loaded.

        Raises CheckpointError or DeviceError where another start would not help, else EngineError.
        """
        ours, theirs = socket.socketpair()
        # The child must find this package however the parent found it.
        imported_from = os.pathsep.join(part for part in sys.path if part)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "nearfar.fallback_server.torch_engine.worker",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, from the child's first moment on
                env=child_environment(PYTHONPATH=imported_from),
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            worker.send(Start(path, options))
            await worker._await_ready(options.start_seconds)
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Queue a message. If the worker is gone, `receive` returns None."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> FromWorker | None:
        """Return the next message; None when the worker is gone."""
        message = await read(self._reader)
        self.heard = time.monotonic()
        return message

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        self.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process now."""
        # Not Process.kill, which polls: it takes the exit status from asyncio's own watcher if the process
        # has ended.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._process.wait()

    async def _await_ready(self, seconds: float) -> None:
        try:
            message = await asyncio.wait_for(self.receive(), seconds)
        except TimeoutError:
            raise EngineError(f"the engine was not ready within {seconds:g} s") from None
        if isinstance(message, Unfit):
            raise (CheckpointError if message.kind == "CheckpointError" else DeviceError)(message.message)
        if not isinstance(message, Ready):
            raise EngineError("the engine's process ended while it loaded the model; its own output says why")
        self.info = message.info
