"""Servers over the tiny model: in a thread, on a free port, with all the options that a test may set."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.numpy import save_file

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.grammars import GrammarService
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.connections import protocol
from tests.support import tiny
from tests.support.numpy_executor import NumpyExecutor

MODEL = "tiny"


def tokenizer_directory(path: Path, template: str = tiny.TEMPLATE) -> Path:
    """Tokenizer files of the tiny model."""
    path.mkdir(parents=True, exist_ok=True)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def tiny_core(*, pages: int = 256, slots: int = 8, context: int = 1024) -> EngineCore:
    """The tiny model with a longer context: descriptions of tools are long where each byte is a token.

    A failed device is opened again, as in a loaded engine; here it is the same device, which works again.
    """
    config = {**tiny.CONFIG, "max_position_embeddings": context}
    executor = NumpyExecutor(config, tiny.weights(), pages=pages, page_size=16, slots=slots)
    description = tiny.manifest(config, slots=slots, page_size=16)
    return EngineCore(
        executor, description, description.programs[0], (pages,), pipelined=True, reopen=lambda: executor
    )


def tiny_checkpoint(path: Path, template: str = tiny.TEMPLATE, context: int = 1024) -> Path:
    """The tiny model as a checkpoint that transformers loads."""
    config = {
        **tiny.CONFIG,
        "max_position_embeddings": context,
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
    }
    tokenizer_directory(path, template)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny.weights(), path / "model.safetensors", metadata={"format": "pt"})
    return path


async def tiny_engine(
    directory: Path,
    *,
    options: TextOptions | None = None,
    max_waiting: int = 256,
    names: Sequence[str] = (),
    grammar_timeout: float = 20.0,
    **core: Any,
) -> LocalEngine:
    """The tiny model as an engine. `directory` holds tokenizer files, or is empty."""
    if not (directory / "tokenizer.json").exists():
        tokenizer_directory(directory)
    made = tiny_core(**core)
    grammars = GrammarService(directory, tiny.CONFIG["vocab_size"], (257,), timeout=grammar_timeout)
    backend = ArtifactBackend(made, grammars, max_waiting=max_waiting)
    engine = LocalEngine(
        backend,
        TextSource(directory, 256),
        options or TextOptions(template_timeout=10, text_processes=1),
        names or (MODEL,),
        here=True,
    )
    await engine.start()
    return engine


class RunningServer:
    """A real server in a thread. `kill` drops all its connections at once, as a crash does."""

    def __init__(
        self, make: Callable[[], Awaitable[ServerEngine]], options: AppOptions | None = None
    ) -> None:
        self._make = make
        self.options = options or AppOptions()
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        if self.error is not None:
            raise self.error

    @property
    def address(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._server.server_state.connections)

    def connected(self, port: int) -> bool:
        """Whether the client with this local port is connected."""
        clients = [connection.client for connection in list(self._server.server_state.connections)]
        return any(client is not None and client[1] == port for client in clients)

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine on the server's event loop."""

        async def call() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)

    @property
    def loop_seconds(self) -> float:
        """CPU seconds of the event loop's thread; other threads and processes do not change them."""

        async def now() -> float:
            return time.thread_time()

        seconds: float = self.run(now)
        return seconds

    def join(self) -> None:
        """Wait until the server has stopped."""
        self._thread.join()

    def close(self) -> None:
        """Stop."""
        self._server.should_exit = True
        self._thread.join(30)

    def kill(self) -> None:
        """Stop listening, cut every connection, and wait until it has stopped."""
        self.cut()
        self._thread.join(30)

    def cut(self) -> None:
        """Make the event loop stop listening and cut every connection."""

        def cut() -> None:
            self._socket.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._server.force_exit = self._server.should_exit = True

        self.loop.call_soon_threadsafe(cut)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = await self._make()
        self.app = create_app(self.engine, self.options)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        # a small buffer, so that a slow reader shows sooner
        limits = replace(self.options.limits, send_buffer=32 << 10)
        config = uvicorn.Config(
            self.app, log_config=None, http=protocol(limits), timeout_graceful_shutdown=2, lifespan="on",
            h11_max_incomplete_event_size=self.options.limits.header_bytes, access_log=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        started = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not started.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        await started
        await self.engine.close()


class Front:
    """`nearfar serve` as a process in front of one of our servers, so that it needs no model."""

    def __init__(self, inner: RunningServer, folder: Path, *arguments: str) -> None:
        self.log = folder / "stderr.txt"
        command = [sys.executable, "-m", "nearfar", "serve", inner.address, "--port", "0", *arguments]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        welcome = self.process.stdout.readline()
        found = re.search(r"at (https?://\S+)", welcome)
        assert found, welcome + self.log.read_text()
        self.url = found[1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
