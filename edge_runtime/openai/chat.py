"""`engine.chat`: answers conversations, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any, Literal, Unpack, overload

from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.context import check_policy, fit_context
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.parameters import (
    ChatParams,
    asked_grammar,
    chat_sampling,
    check_model,
    choices,
    continues_last,
    include_usage,
    streams,
    template_variables,
    tools_and_choice,
)
from nearfar.edge_runtime.openai.pieces import delta_of, message_of
from nearfar.edge_runtime.openai.prompts import ChatEncoder
from nearfar.edge_runtime.openai.records import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceDelta,
    ChoiceLogprobs,
    ChunkChoice,
)
from nearfar.edge_runtime.openai.response import RunningResponse
from nearfar.edge_runtime.openai.stream import AsyncStream
from nearfar.edge_runtime.tools.asking import answer_grammar, offered
from nearfar.edge_runtime.tools.parts import PartReader
from nearfar.edge_runtime.tools.reading import AnswerReader


class Chat:
    """`engine.chat`."""

    def __init__(self, engine: LoadedModel) -> None:
        self.completions = ChatCompletions(engine)


class ChatCompletions:
    """`engine.chat.completions`."""

    def __init__(self, engine: LoadedModel) -> None:
        self._engine = engine

    @overload
    async def create(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **params: Unpack[ChatParams],
    ) -> ChatCompletion: ...
    @overload
    async def create(
        self, messages: Seq[Mapping[str, Any]], *, stream: Literal[True], **params: Unpack[ChatParams]
    ) -> AsyncStream[ChatCompletionChunk]: ...
    @overload
    async def create(
        self, messages: Seq[Mapping[str, Any]], *, stream: bool, **params: Unpack[ChatParams]
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]: ...
    async def create(
        self, messages: Seq[Mapping[str, Any]], *, stream: bool = False, **params: Unpack[ChatParams]
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """Answer a conversation, whole or in chunks."""
        chunks, usage = streams(stream), include_usage(params)
        response = await self.start(messages, params)
        if chunks:
            return AsyncStream(_chat_chunks(response, usage), response.aclose)
        return await _chat_whole(response)

    async def start(self, messages: Seq[Mapping[str, Any]], params: ChatParams) -> RunningResponse:
        """Check a request, and start its answers."""
        sampling = chat_sampling(params, self._engine.manifest.sampling)
        n = choices(params)
        wanted, (tools, choice) = asked_grammar(params), tools_and_choice(params)
        check_model(params, self._engine.manifest.model.name)
        given = checked_messages(messages)
        goes_on = continues_last(params, given)
        engine, policy = self._engine, params.get("context_policy")
        check_policy(policy := engine.context_policy if policy is None else policy)
        form, may = engine.codec.answers, offered(tools, choice)
        encode = ChatEncoder(engine.codec, may, goes_on, template_variables(params))
        fitted = await fit_context(given, policy, (engine.context, sampling.max_tokens), encode, goes_on)
        opened, only = encode.reasoning_open, choice.required and bool(tools)
        grammar = answer_grammar(form, tools, choice, wanted, opened)
        # Text in a requested format may look like a call.
        loose = wanted is None and not only

        def reading() -> PartReader:
            reader = AnswerReader(form, may, reasoning_open=opened, calls_only=only, loose=loose)
            return PartReader(reader)

        context = fitted.tokens if goes_on else ()
        return await RunningResponse.start(engine, "chatcmpl", fitted, context, sampling, n, grammar, reading)


async def _chat_whole(response: RunningResponse) -> ChatCompletion:
    made = [
        Choice(
            one.index,
            message_of(one),
            one.finish or "length",
            ChoiceLogprobs(list(one.logprobs)) if one.logprobs else None,
        )
        for one in await response.collect()
    ]
    return ChatCompletion(**response.head, choices=made, **response.tail)


async def _chat_chunks(response: RunningResponse, usage: bool) -> AsyncGenerator[ChatCompletionChunk, None]:
    head = response.head
    for answer in response.answers:
        yield ChatCompletionChunk(**head, choices=[ChunkChoice(answer.index, ChoiceDelta("", "assistant"))])
    async with aclosing(merge(response.answers)) as pieces:
        async for piece in pieces:
            logprobs = ChoiceLogprobs(list(piece.logprobs)) if piece.logprobs else None
            delta = delta_of(piece)
            yield ChatCompletionChunk(
                **head, choices=[ChunkChoice(piece.index, delta, piece.finish, logprobs)]
            )
    if usage:
        yield ChatCompletionChunk(**head, choices=[], **response.tail)
