"""A streamed response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Generic, Self, TypeVar

Chunk = TypeVar("Chunk")


class AsyncStream(Generic[Chunk]):
    """Chunks as they arrive. Closing the stream stops the request; so does dropping it."""

    def __init__(
        self, chunks: AsyncGenerator[Chunk, None], stop: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`stop` ends the request: closing a generator does not, if it was not started or has not reached its
        answers.
        """
        self._chunks, self._stop = chunks, stop

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await self._chunks.__anext__()

    async def close(self) -> None:
        """Stop the request."""
        await self._chunks.aclose()
        if self._stop is not None:
            await self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
