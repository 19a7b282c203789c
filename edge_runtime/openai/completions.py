"""`engine.completions`: continues texts, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Literal, Unpack, overload

from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.context import Fitted
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.parameters import (
    CompletionParams,
    Echo,
    asked_echo,
    asked_grammar,
    check_model,
    choices,
    completion_sampling,
    include_usage,
    streams,
    token_prompt,
)
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import Completion, CompletionChoice, CompletionLogprobs
from nearfar.edge_runtime.openai.response import RunningResponse
from nearfar.edge_runtime.openai.stream import AsyncStream
from nearfar.edge_runtime.text.beside import beside


class Completions:
    """`engine.completions`."""

    def __init__(self, engine: LoadedModel) -> None:
        self._engine = engine

    @overload
    async def create(
        self, prompt: str | Seq[int], *, stream: Literal[False] = False, **params: Unpack[CompletionParams]
    ) -> Completion: ...
    @overload
    async def create(
        self, prompt: str | Seq[int], *, stream: Literal[True], **params: Unpack[CompletionParams]
    ) -> AsyncStream[Completion]: ...
    @overload
    async def create(
        self, prompt: str | Seq[int], *, stream: bool, **params: Unpack[CompletionParams]
    ) -> Completion | AsyncStream[Completion]: ...
    async def create(
        self, prompt: str | Seq[int], *, stream: bool = False, **params: Unpack[CompletionParams]
    ) -> Completion | AsyncStream[Completion]:
        """Continue a text (an empty text: from BOS) or token ids, whole or in chunks."""
        chunks = streams(stream)
        sampling = completion_sampling(params, self._engine.manifest.sampling)
        n, usage = choices(params), include_usage(params)
        grammar = asked_grammar(params)
        check_model(params, self._engine.manifest.model.name)
        codec = self._engine.codec
        if isinstance(prompt, str):
            tokens = await beside(lambda: codec.encode(prompt), len(prompt))
        else:
            tokens = token_prompt(prompt)
        whole = Fitted(tokens, None)
        response = await RunningResponse.start(self._engine, "cmpl", whole, tokens, sampling, n, grammar)
        if echo := asked_echo(params):
            text = prompt if isinstance(prompt, str) else self._engine.codec.decode(tokens)
            for answer in response.answers:
                answer.begins_with(text, alone=echo is Echo.ALONE)
        if chunks:
            return AsyncStream(_completion_chunks(response, usage), response.aclose)
        return await _completion_whole(response)


async def _completion_whole(response: RunningResponse) -> Completion:
    made = [
        CompletionChoice(one.index, one.text, one.finish or "length", _parallel(one))
        for one in await response.collect()
    ]
    return Completion(**response.head, choices=made, **response.tail)


async def _completion_chunks(response: RunningResponse, usage: bool) -> AsyncGenerator[Completion, None]:
    async with aclosing(merge(response.answers)) as pieces:
        async for piece in pieces:
            choice = CompletionChoice(piece.index, piece.text, piece.finish, _parallel(piece))
            yield Completion(**response.head, choices=[choice])
    if usage:
        yield Completion(**response.head, choices=[], **response.tail)


def _parallel(piece: Piece) -> CompletionLogprobs | None:
    logprobs = piece.logprobs
    if not logprobs:
        return None
    top = [{other.token: other.logprob for other in item.top_logprobs} for item in logprobs]
    return CompletionLogprobs(
        [i.token for i in logprobs], [i.logprob for i in logprobs], top, list(piece.offsets)
    )
