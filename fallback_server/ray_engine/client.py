"""The engines on Ray as one token backend over a Serve handle. A lost replica loses no request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.errors import EngineError, NearfarError, OverloadError
from nearfar.fallback_server.backend import (
    BackendEvent,
    BackendInfo,
    BackendStats,
    EmbedRequest,
    LabelScores,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.ray_engine.continuing import ContinuedAnswer
from nearfar.fallback_server.ray_engine.messages import Events, Refusal
from nearfar.fallback_server.ray_engine.options import RayOptions
from nearfar.fallback_server.token_stream import TaskStream, TaskStreams, check_room

log = logging.getLogger(__name__)

FRESH = 5.0
"""Seconds for which a token proves that a replica lives, and seconds that a probe may take."""
PAUSE = 0.1
"""Seconds before another replica is tried, doubled each time. Serve learns of a death meanwhile."""

Close = Callable[[], Awaitable[None]]


@dataclass
class _Counts:
    """Figures since the start."""

    prompt: int = 0
    generated: int = 0
    hits: int = 0
    lost: int = 0
    running: int = 0


class RayBackend:
    """Sends requests to replicas through `handle`, a Serve handle of EngineReplica. `on_close` ends what was
    started for it.
    """

    def __init__(
        self, handle: Any, info: BackendInfo, options: RayOptions, on_close: Close | None = None
    ) -> None:
        self.info = info
        self._handle = handle
        self._options = options
        self._on_close = on_close
        self._streams = TaskStreams()
        self._counts = _Counts()
        self._replicas: dict[str, BackendStats] = {}
        self._last_token = 0.0
        self._closing = False

    @classmethod
    async def connect(cls, handle: Any, options: RayOptions, on_close: Close | None = None) -> RayBackend:
        """Query a replica for its model. Raises EngineError where none answers."""
        try:
            made = cls(handle, await handle.describe.remote(), options, on_close)
            made._note(await handle.stats.remote())
            return made
        except (RayError, RayServeException) as error:
            raise EngineError(f"no replica says what it serves: {_short(error)}") from error

    def submit(self, request: TokenRequest) -> AsyncIterator[BackendEvent]:
        """Start a request. See Backend."""
        if self._closing:
            raise OverloadError("the server is shutting down", 5.0)
        self._streams.check_new(request.id)
        check_room(len(self._streams) - self._counts.running, self._options.max_waiting)
        self._counts.prompt += len(request.tokens)
        return self._streams.start(request.id, lambda stream: self._run(ContinuedAnswer(request), stream))

    async def cancel(self, request_id: str) -> None:
        """End a request."""
        await self._streams.cancel(request_id)

    async def embed(self, request: EmbedRequest) -> Vector:
        """Return the vector of a sequence, computed by any replica."""
        vector: Vector = await self._once("embed", request)
        return vector

    async def score(self, request: ScoreRequest) -> LabelScores:
        """Return the log-probabilities of labels, computed by any replica."""
        found: LabelScores = await self._once("score", request)
        return found

    async def _once(self, method: str, request: EmbedRequest | ScoreRequest) -> Any:
        """Return the result of a replica's method; if a replica dies, another one is tried."""
        if self._closing:
            raise OverloadError("the server is shutting down", 5.0)
        check_room(len(self._streams) - self._counts.running, self._options.max_waiting)
        for attempt in range(self._options.attempts):
            await self._pause(attempt)
            try:
                found = await getattr(self._handle, method).remote(request)
            except (RayError, RayServeException) as error:
                self._lost(error)
                continue
            if isinstance(found, Refusal):
                raise found.error()
            return found
        raise EngineError(f"{self._options.attempts} engines died while they computed the input")

    def stats(self) -> BackendStats:
        """Return the figures as counted on this side, and what each replica reported with its last answer.
        `program` is that of the replica that reported first: all have the same artifact.
        """
        counts, said = self._counts, list(self._replicas.values())
        return BackendStats(
            running=counts.running,
            waiting=len(self._streams) - counts.running,
            cache_usage=sum(stats.cache_usage for stats in said) / len(said) if said else 0.0,
            prefix_hits=counts.hits,
            prefix_queries=counts.prompt,
            preemptions=sum(stats.preemptions for stats in said),
            generated_tokens=counts.generated,
            prompt_tokens=counts.prompt,
            steps=sum(stats.steps for stats in said),
            restarts=counts.lost,
            memory=sum(stats.memory for stats in said),
            program=next((stats.program for stats in said if stats.program is not None), None),
        )

    async def alive(self) -> bool:
        """Whether a replica generated a token lately, or does so within FRESH seconds."""
        if time.monotonic() - self._last_token < FRESH:
            return True
        try:
            return bool(await asyncio.wait_for(self._ask_alive(), FRESH))
        except (RayError, RayServeException, TimeoutError):
            return False

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for requests under way, then stop."""
        self._closing = True
        await self._streams.close(drain)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()

    async def _run(self, answer: ContinuedAnswer, stream: TaskStream) -> None:
        """Run one request until its last token, through as many replicas as that takes."""
        error: NearfarError = EngineError("no engine took the request")
        try:
            for attempt in range(self._options.attempts):
                await self._pause(attempt)
                try:
                    return await self._follow(answer, stream)
                except BackPressureError as full:
                    raise OverloadError(f"all replicas are full: {full}", 2.0) from full
                except (RayError, RayServeException, EngineError) as lost:
                    self._lost(lost)
                    error = EngineError(f"the engine died while it answered the request: {_short(lost)}")
            stream.put(error)
        except NearfarError as refusal:
            stream.put(refusal)
        except Exception as failure:  # a bug in this code must not leave the reader waiting
            log.exception("request %s failed", answer.request.id)
            stream.put(EngineError(f"the engine failed: {type(failure).__name__}: {failure}"))

    async def _follow(self, answer: ContinuedAnswer, stream: TaskStream) -> None:
        """Forward a replica's events of the request to their end. Raises the error that the replica
        reports.
        """
        records = self._handle.options(stream=True).generate.remote(answer.ask())
        running = False
        try:
            async for record in records:
                if isinstance(record, Refusal):
                    raise record.error()
                self._counts.running += not running
                running = True
                if self._take(record, answer, stream):
                    return
            raise EngineError("the answer broke off")
        finally:
            self._counts.running -= running
            records.cancel()

    def _note(self, record: Events) -> None:
        """Keep the figures that a replica reports."""
        if record.stats is not None:
            self._replicas[record.replica] = record.stats

    def _take(self, record: Events, answer: ContinuedAnswer, stream: TaskStream) -> bool:
        """Forward events; returns whether the answer is complete."""
        self._last_token = time.monotonic()
        self._note(record)
        for event in record.events:
            if event.finish == "abort":  # the server did not ask for the abort: the replica is shutting down
                raise EngineError("the replica ended the answer")
            made = answer.take(event)
            if made is None:
                continue
            self._counts.generated += 1
            self._counts.hits += made.cached_tokens
            stream.put(made)
            if made.finish is not None:
                return True
        return False

    async def _ask_alive(self) -> bool:
        return bool(await self._handle.alive.remote())

    async def _pause(self, attempt: int) -> None:
        if attempt:
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1))

    def _lost(self, error: Exception) -> None:
        self._counts.lost += 1
        log.warning("an engine was lost while it computed a request: %s", _short(error))


def _short(error: Exception) -> str:
    """The first line of an error: Ray's messages are pages long, and their first line says what happened."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
