"""Log-probabilities of labels from a backend that gives them for the tokens of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from nearfar.edge_runtime.engine.together import together
from nearfar.errors import EngineError, RequestError
from nearfar.fallback_server.backend import (
    Backend,
    BackendEvent,
    LabelScores,
    Sampling,
    ScoreRequest,
    TokenRequest,
)


async def score_by_prompts(backend: Backend, request: ScoreRequest) -> LabelScores:
    """Return the log-probabilities of each label's tokens after a prompt.

    Each label is a sequence of its own that begins with the prompt. The first one is computed alone, so that
    the others find the prompt in the cache.
    """
    if not request.labels or not all(request.labels):
        raise RequestError("labels: give at least one, and no empty one", "labels")
    labels = list(dict.fromkeys(request.labels))
    found = {labels[0]: await _scored(backend, request, 0, labels[0])}
    waiting = iter(list(enumerate(labels))[1:])

    async def work() -> None:
        for index, label in waiting:
            found[label] = await _scored(backend, request, index, label)

    at_once = min(max(backend.info.max_running // 2, 1), len(labels))
    await together(work, at_once)
    return [found[label] for label in request.labels]


async def _scored(
    backend: Backend, request: ScoreRequest, index: int, label: tuple[int, ...]
) -> tuple[float, ...]:
    sequence = TokenRequest(
        f"{request.id}-{index}",
        (*request.tokens, *label),
        1,
        Sampling(temperature=0.0),
        prompt_logprobs=0,
        prompt_logprobs_from=len(request.tokens),
        priority=request.priority,
        salt=request.salt,
        late=request.late,
    )
    events = backend.submit(sequence)
    async with AsyncExitStack() as stack:
        if (close := getattr(events, "aclose", None)) is not None:
            stack.push_async_callback(close)
        given = (await _first(events)).prompt_logprobs or ()
    own = [entry[0].logprob for entry in given if entry is not None]
    if len(own) != len(label):
        raise EngineError("the engine gave no log-probabilities of the label's tokens")
    return tuple(own)


async def _first(events: AsyncIterator[BackendEvent]) -> Any:
    async for event in events:
        return event
    raise EngineError("the engine ended the request without an event")
