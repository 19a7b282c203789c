"""Parts of the engines on Ray, without Ray: continuing an answer, prefixes, batches, options."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import EngineError, NearfarError, OverloadError, RequestError
from nearfar.fallback_server.backend import BackendEvent, Sampling, TokenRequest
from nearfar.fallback_server.prefixes import TOKENS, PrefixMap, token_blocks
from nearfar.fallback_server.ray_engine.continuing import ContinuedAnswer
from nearfar.fallback_server.ray_engine.messages import Refusal
from nearfar.fallback_server.ray_engine.options import RayOptions, parse_replicas
from nearfar.fallback_server.ray_engine.replica import in_batches


def test_an_answer_goes_on_from_its_tokens() -> None:
    answer = ContinuedAnswer(
        TokenRequest("a", (1, 2), 10, Sampling(seed=None), min_tokens=5, prompt_logprobs=1)
    )
    first = answer.ask()
    assert (first.tokens, first.max_tokens, first.prompt_logprobs) == ((1, 2), 10, 1)
    assert first.sampling.seed is not None
    again = answer.ask()
    assert again.id != first.id  # a replica that was only out of reach may still have the first id
    assert again.tokens == (1, 2)
    events = [BackendEvent(7, cached_tokens=1, prompt_logprobs=(None,)), BackendEvent(8)]
    assert [answer.take(event) for event in events] == events
    third = answer.ask()
    assert (third.tokens, third.max_tokens, third.min_tokens, third.prompt_logprobs) == (
        (1, 2, 7, 8),
        8,
        3,
        None,
    )
    assert third.sampling.seed == first.sampling.seed
    # the client learns how many tokens were cached
    assert answer.take(BackendEvent(9, cached_tokens=4)) == BackendEvent(9)


@pytest.mark.parametrize(
    ("sampling", "grammar"),
    [
        (Sampling(presence_penalty=0.5), None),
        (Sampling(frequency_penalty=0.5), None),
        (Sampling(), Grammar("regex", "a+")),
    ],
)
def test_an_answer_that_depends_on_its_tokens_is_repeated_and_compared(
    sampling: Sampling, grammar: Grammar | None
) -> None:
    answer = ContinuedAnswer(TokenRequest("a", (1,), 10, sampling, grammar=grammar))
    first = answer.ask()
    for token in (7, 8):
        answer.take(BackendEvent(token))
    again = answer.ask()
    assert (again.tokens, again.max_tokens, again.sampling) == (
        first.tokens,
        first.max_tokens,
        first.sampling,
    )
    assert [answer.take(BackendEvent(token)) for token in (7, 8)] == [None, None]
    assert [answer.take(BackendEvent(token)) for token in (9, 10)] == [BackendEvent(9), BackendEvent(10)]
    answer.ask()
    answer.take(BackendEvent(7))
    with pytest.raises(EngineError, match="did not repeat"):
        answer.take(BackendEvent(5))


def test_prefixes_know_the_replica_with_the_longest_beginning() -> None:
    prefixes = PrefixMap[str](remembered=8)
    prompt = list(range(4 * TOKENS))
    assert prefixes.known(token_blocks(prompt)) == []
    prefixes.remember(token_blocks(prompt[: 2 * TOKENS]), "a")
    prefixes.remember(token_blocks([*prompt[:TOKENS], *[0] * TOKENS]), "b")
    assert prefixes.known(token_blocks(prompt)) == ["a", "b"]
    assert prefixes.known(token_blocks(prompt[: 2 * TOKENS - 1])) == ["b"]
    assert prefixes.known(token_blocks(prompt[1:])) == []
    assert prefixes.known(token_blocks(prompt[: TOKENS - 1])) == []
    # the cache of another tenant does not have these blocks
    assert prefixes.known(token_blocks(prompt, "another tenant's")) == []
    prefixes.remember(token_blocks(prompt[:TOKENS], "another tenant's"), "a")
    assert prefixes.known(token_blocks(prompt, "another tenant's")) == ["a"]
    # as many blocks as there is room for
    prefixes.remember(token_blocks(range(1000, 1000 + 8 * TOKENS)), "c")
    assert prefixes.known(token_blocks(prompt)) == []


class Source:
    """Events that the test supplies, then an error or the end."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[BackendEvent | Exception | None] = asyncio.Queue()
        self.closed = False

    def __aiter__(self) -> AsyncIterator[BackendEvent]:
        return self

    async def __anext__(self) -> BackendEvent:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        self.closed = True


async def test_batches_hold_what_has_come_and_lose_nothing() -> None:
    source = Source()
    batches = in_batches(source)
    source.items.put_nowait(BackendEvent(0))
    assert await asyncio.wait_for(anext(batches), 5) == (BackendEvent(0),)
    for token in range(1, 6):
        source.items.put_nowait(BackendEvent(token))
    source.items.put_nowait(EngineError("gone"))
    assert [event.token for event in await asyncio.wait_for(anext(batches), 5)] == [1, 2, 3, 4, 5]
    with pytest.raises(EngineError, match="gone"):
        await anext(batches)
    assert source.closed
    given_up = Source()
    batches = in_batches(given_up)
    given_up.items.put_nowait(BackendEvent(0))
    await anext(batches)
    await batches.aclose()
    assert given_up.closed


@pytest.mark.parametrize(
    "error", [RequestError("no", "seed"), OverloadError("full", 3.0), EngineError("dead")]
)
def test_errors_cross_as_data(error: NearfarError) -> None:
    again = Refusal.of(error).error()
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_bug_in_a_replica_crosses_as_an_engine_error() -> None:
    assert "KeyError" in str(Refusal.of(KeyError("x")).error())


def test_replicas() -> None:
    assert parse_replicas("2") == (2, 2)
    assert parse_replicas("1:8") == (1, 8)
    for wrong in ("", "a", "1:", ":2", "1:2:3"):
        with pytest.raises(RequestError, match="replicas"):
            parse_replicas(wrong)
    with pytest.raises(RequestError, match="MIN <= MAX"):
        RayOptions(min_replicas=0)
