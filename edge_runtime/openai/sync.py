"""The synchronous interface: runs the asynchronous engine on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from nearfar.edge_runtime.artifact.options import LoadKeywords
from nearfar.edge_runtime.engine.core import CLOSED, FORKED
from nearfar.edge_runtime.engine.requests import TokenEvent
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.openai.api import AsyncEngine
from nearfar.edge_runtime.openai.context import ContextPolicy
from nearfar.edge_runtime.openai.decisions import Asked, Decision
from nearfar.edge_runtime.openai.parameters import ChatParams, CompletionParams
from nearfar.edge_runtime.openai.records import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CreateEmbeddingResponse,
)
from nearfar.edge_runtime.openai.responses.checks import ResponseParams
from nearfar.edge_runtime.openai.responses.create import Response, ResponseEvent
from nearfar.edge_runtime.openai.stream import AsyncStream
from nearfar.edge_runtime.progress import Tell
from nearfar.edge_runtime.snapshots import Progress, Snapshot
from nearfar.errors import DeviceError
from nearfar.format.manifest import Manifest

T = TypeVar("T")
Item = TypeVar("Item")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nearfar-engine", daemon=True)
        self._thread.start()
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one with the thread."""
        return os.getpid() != self._process

    @property
    def stopped(self) -> bool:
        """Whether the loop is closed."""
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it; interrupting the wait cancels it.

        DeviceError in a forked process, and if the loop is stopped.
        """
        if self.forked or self.stopped:
            coroutine.close()
            raise DeviceError(FORKED if self.forked else CLOSED)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread, after closing objects that libraries left open on the loop."""
        self.run(_finished())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _finished() -> None:
    """Close this loop's asynchronous generators, as asyncio.run does.

    httpx leaves its own to the loop if an event stream ends before the connection. Tasks that still run a
    second later are cancelled.
    """
    await asyncio.get_running_loop().shutdown_asyncgens()
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        _, late = await asyncio.wait(others, timeout=1)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class Stream(Generic[Item]):
    """Items as they arrive. Closing the stream stops the request; so does leaving the loop over it early, or
    Ctrl-C in it.
    """

    def __init__(
        self, loop: LoopThread, items: AsyncIterator[Item], close: Coroutine[Any, Any, None]
    ) -> None:
        self._loop = loop
        self._items = items
        self._turn = asyncio.Lock()
        self._close: Coroutine[Any, Any, None] | None = close

    def __iter__(self) -> Iterator[Item]:
        try:
            while True:
                try:
                    yield self._loop.run(self._next())
                except StopAsyncIteration:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Stop the request."""
        close, self._close = self._close, None
        # the loop belongs to the parent process, or has ended
        if close is not None and (self._loop.forked or self._loop.stopped):
            close.close()
        elif close is not None:
            self._loop.run(self._after_next(close))

    async def _next(self) -> Item:
        async with self._turn:
            return await anext(self._items)

    async def _after_next(self, close: Coroutine[Any, Any, None]) -> None:
        """Close after the item whose wait Ctrl-C interrupted.

        Cancelling takes time, and a generator that still runs cannot be closed.
        """
        async with self._turn:
            await close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._close is not None:
            self._close.close()


class Engine:
    """A model on a device, for synchronous code. Several threads may use it at once: their requests share
    steps.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.asynchronous = engine
        self._loop = LoopThread()
        self._closed = False
        self.chat = _Chat(self._loop, engine)
        self.completions = _Completions(self._loop, engine)
        self.embeddings = _Embeddings(self._loop, engine)
        self.responses = _Responses(self._loop, engine)

    @property
    def loop(self) -> LoopThread:
        """The loop that runs the asynchronous engine; the engine may be used only there."""
        return self._loop

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        context_policy: ContextPolicy = "error",
        progress: Tell | None = None,
        **options: Unpack[LoadKeywords],
    ) -> Engine:
        """See AsyncEngine.load."""
        loading = AsyncEngine.load(path, context_policy=context_policy, progress=progress, **options)
        return cls(_run_apart(loading))

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self.asynchronous.manifest

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.asynchronous.context

    def generate(self, tokens: Seq[int], params: SamplingParams | None = None) -> Stream[TokenEvent]:
        """Generate token events from token ids."""

        async def start() -> Stream[TokenEvent]:
            generation = self.asynchronous.generate(tokens, params)
            return Stream(self._loop, generation, generation.aclose())

        return self._loop.run(start())

    def decide(
        self,
        prompt: Asked,
        labels: Seq[str] | None = None,
        *,
        values: Seq[float] | None = None,
        neutral: Asked | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Decision:
        """See AsyncEngine.decide."""
        deciding = self.asynchronous.decide(
            prompt, labels, values=values, neutral=neutral, chat_template_kwargs=chat_template_kwargs
        )
        return self._loop.run(deciding)

    def save_cache(
        self,
        path: str | Path,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        tokens: Seq[int] | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Snapshot:
        """See AsyncEngine.save_cache. Ctrl-C stops it and leaves no file."""
        saving = self.asynchronous.save_cache(
            path, messages=messages, prompt=prompt, tokens=tokens, force=force, progress=progress
        )
        return self._loop.run(saving)

    def load_cache(self, path: str | Path, *, progress: Progress | None = None) -> Snapshot:
        """See AsyncEngine.load_cache."""
        return self._loop.run(self.asynchronous.load_cache(path, progress=progress))

    def close(self) -> None:
        """Stop all requests and free the device. In a forked process, do nothing: all of that belongs to the
        parent.
        """
        if not self._closed:
            self._closed = True
            if self._loop.forked:
                return
            self._loop.run(self.asynchronous.close())
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Chat:
    """`engine.chat`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine) -> None:
        self.completions = _ChatCompletions(loop, engine)


class _ChatCompletions:
    """`engine.chat.completions`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine) -> None:
        self._loop, self._engine = loop, engine

    @overload
    def create(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **params: Unpack[ChatParams],
    ) -> ChatCompletion: ...
    @overload
    def create(
        self, messages: Seq[Mapping[str, Any]], *, stream: Literal[True], **params: Unpack[ChatParams]
    ) -> Stream[ChatCompletionChunk]: ...
    def create(
        self, messages: Seq[Mapping[str, Any]], *, stream: bool = False, **params: Unpack[ChatParams]
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """Answer a conversation, whole or in chunks."""
        made = self._loop.run(self._engine.chat.completions.create(messages, stream=stream, **params))
        return Stream(self._loop, made, made.close()) if isinstance(made, AsyncStream) else made


class _Completions:
    """`engine.completions`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine) -> None:
        self._loop, self._engine = loop, engine

    @overload
    def create(
        self, prompt: str | Seq[int], *, stream: Literal[False] = False, **params: Unpack[CompletionParams]
    ) -> Completion: ...
    @overload
    def create(
        self, prompt: str | Seq[int], *, stream: Literal[True], **params: Unpack[CompletionParams]
    ) -> Stream[Completion]: ...
    def create(
        self, prompt: str | Seq[int], *, stream: bool = False, **params: Unpack[CompletionParams]
    ) -> Completion | Stream[Completion]:
        """Continue a text or token ids, whole or in chunks."""
        made = self._loop.run(self._engine.completions.create(prompt, stream=stream, **params))
        return Stream(self._loop, made, made.close()) if isinstance(made, AsyncStream) else made


class _Responses:
    """`engine.responses`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine) -> None:
        self._loop, self._engine = loop, engine

    @overload
    def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: Literal[False] = False,
        **params: Unpack[ResponseParams],
    ) -> Response: ...
    @overload
    def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: Literal[True],
        **params: Unpack[ResponseParams],
    ) -> Stream[ResponseEvent]: ...
    def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: bool = False,
        **params: Unpack[ResponseParams],
    ) -> Response | Stream[ResponseEvent]:
        """See nearfar.edge_runtime.openai.responses.create.Responses.create."""
        made = self._loop.run(self._engine.responses.create(input, stream=stream, **params))
        return Stream(self._loop, made, made.close()) if isinstance(made, AsyncStream) else made


class _Embeddings:
    """`engine.embeddings`."""

    def __init__(self, loop: LoopThread, engine: AsyncEngine) -> None:
        self._loop, self._engine = loop, engine

    def create(
        self,
        input: str | Seq[str] | Seq[int] | Seq[Seq[int]],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        encoding_format: str | None = None,
        user: str | None = None,
    ) -> CreateEmbeddingResponse:
        """See nearfar.edge_runtime.openai.embeddings.Embeddings.create."""
        return self._loop.run(
            self._engine.embeddings.create(
                input, model=model, dimensions=dimensions, encoding_format=encoding_format, user=user
            )
        )


def _run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new loop, even if the caller is already inside one (a notebook)."""
    loop = LoopThread()
    try:
        return loop.run(coroutine)
    finally:
        loop.stop()
