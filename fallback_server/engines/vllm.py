"""vLLM as a supervised child process on a loopback address, behind the same front as other upstreams."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
from collections import deque
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from nearfar.children import child_environment
from nearfar.edge_runtime.progress import Teller
from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.backend import BackendStats
from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions

log = logging.getLogger(__name__)

COMMAND = "vllm"
CARD = Path("/dev/nvidiactl")
"""The device file that NVIDIA's driver makes."""


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is started. `command`: its program; `arguments`: more options for it. Times are in seconds:
    `start` to load the model, `look` between two checks of its health, of which `failures` in a row restart
    it, `wait` before a restart, doubled up to `longest` while it ends at once.
    """

    command: str = COMMAND
    arguments: tuple[str, ...] = ()
    start: float = 1800.0
    look: float = 5.0
    failures: int = 6
    wait: float = 1.0
    longest: float = 60.0
    stop: float = 30.0


def vllm_is_there(command: str = COMMAND) -> bool:
    """Whether vLLM can compute on this machine: its program is installed, and there is a GPU with CUDA."""
    return CARD.exists() and shutil.which(command) is not None


class Child:
    """A vLLM process: started, watched, restarted and ended. Each start has a new port and the same key."""

    def __init__(self, model: str, name: str, options: VllmOptions) -> None:
        self._model, self._name, self.options = model, name, options
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.key = secrets.token_urlsafe(32)
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=20)
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address of vLLM's server."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start vLLM and wait until it is healthy. Raises EngineError with its last lines if it ends."""
        await self._launch()
        try:
            await self._healthy_within(self.options.start)
        except BaseException:
            await self._end(0.0)
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End vLLM, with all its own processes."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,))
        await self._end(self.options.stop)

    async def _launch(self) -> None:
        command = shutil.which(self.options.command)
        if command is None:
            raise RequestError(
                f"--engine vllm needs vLLM's program, and there is no {self.options.command!r}: install "
                "vllm, or name it with --vllm-command"
            )
        arguments = (
            "serve", self._model, "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name",
            self._name, "--scheduling-policy", "priority", *self.options.arguments,
        )  # fmt: skip
        more = {"VLLM_API_KEY": self.key}
        if token := os.environ.get("HF_TOKEN"):
            more["HF_TOKEN"] = token  # for gated models, which it downloads itself
        self._lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            command, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, env=child_environment(**more), start_new_session=True,
            limit=1 << 20,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))
        log.info("vLLM starts as process %d", self._process.pid)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # the line is longer than the limit
                continue
            if not line:
                return
            text = ascii(line.decode(errors="replace").rstrip())[1:-1][:2000]
            self._lines.append(text)
            log.debug("vLLM: %s", text)

    async def _healthy_within(self, seconds: float) -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not await self._healthy():
            if self._process.returncode is not None:
                if self._reader is not None:
                    await asyncio.wait((self._reader,), timeout=1.0)
                said = "\n".join(self._lines) or "nothing"
                raise EngineError(f"vLLM ended with status {self._process.returncode}; it said last:\n{said}")
            if loop.time() > until:
                raise EngineError(
                    f"vLLM is not healthy after {seconds:g} s; its log (--log-level debug) says why"
                )
            await asyncio.sleep(min(self.options.look, 0.5))

    async def _healthy(self) -> bool:
        try:
            # Plain HTTP needs no certificates, which take 20 ms of processor time to read.
            async with httpx.AsyncClient(trust_env=False, verify=False, timeout=self.options.look) as http:
                found = await http.get(f"{self.address}/health")
        except httpx.HTTPError:
            return False
        return found.is_success

    async def _watch(self) -> None:
        """Restart vLLM when it has ended, or was not healthy for too long."""
        failures, wait = 0, self.options.wait
        while True:
            assert self._process is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self.options.look)
            if self._process.returncode is None:
                failures = 0 if await self._healthy() else failures + 1
                if failures < self.options.failures:
                    continue
                log.error("vLLM is not healthy; it is restarted")
                await self._end(0.0)
            else:
                log.error("vLLM ended with status %s; it is restarted", self._process.returncode)
            failures, self.restarts = 0, self.restarts + 1
            await asyncio.sleep(wait)
            try:
                await self._launch()
                await self._healthy_within(self.options.start)
                wait = self.options.wait
                log.info("vLLM is healthy again")
            except (EngineError, RequestError, OSError) as error:
                log.error("vLLM does not start: %s", error)
                await self._end(0.0)
                wait = min(2 * wait, self.options.longest)

    async def _end(self, seconds: float) -> None:
        """End the process and its session, by force after `seconds`."""
        process = self._process
        if process is None:
            return
        if process.returncode is None and seconds:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine's processes, too
        await process.wait()
        if self._reader is not None:
            await asyncio.wait((self._reader,), timeout=5.0)


class VllmEngine(UpstreamEngine):
    """A vLLM child as an engine: its requests carry the tenants' salts and priorities."""

    child: Child

    @classmethod
    async def open(
        cls, model: str, options: VllmOptions, upstream: UpstreamOptions, names: Seq[str], telling: Teller
    ) -> VllmEngine:
        """Start vLLM with a model, and connect to it. `names`: what clients call the model."""
        name = names[0] if names else Path(model).name if Path(model).exists() else model
        child = Child(model, name, options)
        telling("loading")
        await child.start()
        try:
            given = replace(
                upstream, key=child.key, continues=True, salts=True, priorities=True, probe_seconds=2.0
            )
            engine = await cls.connect([child.address], given, names if len(names) > 1 else ())
        except BaseException:
            await child.close()
            raise
        engine.child = child
        return engine

    def stats(self) -> BackendStats:
        """Return the figures as counted on this side, with the restarts of vLLM."""
        stats, restarts = super().stats(), self.child.restarts
        first = next(iter(stats.by_model), "")
        by_model = {
            name: replace(each, restarts=restarts if name == first else 0)
            for name, each in stats.by_model.items()
        }
        return replace(stats, restarts=restarts, by_model=by_model)

    async def close(self, drain: float = 0.0) -> None:
        """End the requests under way, then vLLM."""
        await super().close(drain)
        await self.child.close()
