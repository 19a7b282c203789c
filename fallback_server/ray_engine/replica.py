"""One engine on a Ray cluster: any token backend, with methods that a Serve handle can call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.errors import EngineError, NearfarError
from nearfar.fallback_server.backend import (
    Backend,
    BackendEvent,
    BackendInfo,
    EmbedRequest,
    LabelScores,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.engines.opening import EngineKind, EngineOptions, open_backend, text_source
from nearfar.fallback_server.ray_engine.messages import Events, Refusal

log = logging.getLogger(__name__)

GATHER = 0.03
"""Seconds between records of a request after the first. A record costs Ray far more than a token costs an
engine.
"""


class EngineReplica:
    """Loads the model when Serve starts it; afterwards everything runs on Serve's event loop for user
    code.
    """

    async def __init__(self, model: str, kind: EngineKind, options: EngineOptions) -> None:  # type: ignore[misc]
        # Serve awaits a constructor, which type checkers do not know.
        from ray import serve

        source = await asyncio.to_thread(text_source, model, kind, options)
        self._backend: Backend = await open_backend(source, options)
        self._name: str = serve.get_replica_context().replica_id.unique_id

    async def generate(self, request: TokenRequest) -> AsyncGenerator[Events | Refusal, None]:
        """Yield the events of a request; an error is the last record."""
        try:
            stream = self._backend.submit(request)
            async with aclosing(in_batches(stream)) as batches:
                async for batch in batches:
                    last = batch[-1].finish is not None
                    yield Events(batch, self._name, self._backend.stats() if last else None)
        except Exception as error:
            if not isinstance(error, NearfarError):
                log.exception("request %s failed", request.id)
            yield Refusal.of(error)

    async def describe(self) -> BackendInfo:
        """Return the model's facts and limits."""
        return self._backend.info

    async def stats(self) -> Events:
        """Return the engine's figures, in a record without events."""
        return Events((), self._name, self._backend.stats())

    async def embed(self, request: EmbedRequest) -> Vector | Refusal:
        """Return the vector of a sequence, or an error as a record."""
        try:
            return await self._backend.embed(request)
        except NearfarError as error:
            return Refusal.of(error)

    async def score(self, request: ScoreRequest) -> LabelScores | Refusal:
        """Return the log-probabilities of labels, or why there are none."""
        try:
            return await self._backend.score(request)
        except NearfarError as error:
            return Refusal.of(error)

    async def alive(self) -> bool:
        """Whether the engine generates tokens."""
        return await self._backend.alive()

    async def check_health(self) -> None:
        """Raise EngineError if no token comes. Serve calls this every few seconds and replaces a replica that
        fails three times.
        """
        if not await self._backend.alive():
            raise EngineError("no token was generated recently")


async def in_batches(events: AsyncIterator[BackendEvent]) -> AsyncGenerator[tuple[BackendEvent, ...], None]:
    """Yield the first event at once, then the events of every GATHER seconds together.

    Raises the error of `events` after the events before it. Closes `events` in any case.
    """
    queue: asyncio.Queue[BackendEvent | Exception | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async for event in events:
                queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(read())
    try:
        while True:
            batch: list[BackendEvent] = []
            item = await queue.get()
            while isinstance(item, BackendEvent):
                batch.append(item)
                if queue.empty():
                    break
                item = queue.get_nowait()
            if batch:
                yield tuple(batch)
                if item is not None and not isinstance(item, Exception) and batch[-1].finish is None:
                    await asyncio.sleep(GATHER)
            if isinstance(item, Exception):
                raise item
            if item is None:
                return
    finally:
        task.cancel()
        await asyncio.wait([task])
        close = getattr(
            events, "aclose", None
        )  # generators and streams have `aclose`, but the protocol asks only for an iterator
        if close is not None:
            await close()
