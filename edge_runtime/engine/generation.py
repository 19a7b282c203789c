"""The events of a request, as its caller iterates them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from nearfar.edge_runtime.engine.requests import FinishReason, Logprob, Request, RequestStats, TokenEvent
from nearfar.edge_runtime.engine.steps import Sampled


class Generation:
    """The tokens of one request, to be iterated once.

    The request stops when this object is closed or dropped, or when the task that iterates it is cancelled.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        self._cancel = cancel
        self._request = request
        self._events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(event, Exception):
            self._ended = True
            raise event
        self._ended = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Stop the request if it is still running."""
        self._ended = True
        self._cancel(self._request)

    def put(self, event: TokenEvent | Exception) -> None:
        """Queue an event for the iterating task."""
        self._events.put_nowait(event)

    @property
    def stats(self) -> RequestStats:
        """The figures of the request so far."""
        return self._request.stats()


def event_of(
    request: Request, token: int, finish: FinishReason | None, sampled: Sampled, row: int
) -> TokenEvent:
    """The event of a token that was sampled for a row, with the log probabilities that the request wants."""
    if sampled.embeddings is not None:
        return TokenEvent(token, finish, embedding=sampled.embeddings[row])
    count = request.params.logprobs
    if count is None or sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return TokenEvent(token, finish)
    ids, values = sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    top = tuple(Logprob(i, v) for i, v in zip(ids, values, strict=True))
    return TokenEvent(token, finish, float(sampled.logprobs[row]), top)
