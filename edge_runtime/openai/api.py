"""OpenAI's interface over the engine: chat completions and completions, whole or streamed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from nearfar.edge_runtime import snapshots
from nearfar.edge_runtime.artifact.loading import load
from nearfar.edge_runtime.artifact.options import LoadKeywords, LoadOptions
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.compiler import Grammars
from nearfar.edge_runtime.openai.answers import Answer, Piece, merge
from nearfar.edge_runtime.openai.parameters import (
    ChatParams,
    CompletionParams,
    asked_grammar,
    chat_sampling,
    check_model,
    checked_messages,
    choices,
    completion_sampling,
    continues_last,
    include_usage,
    token_prompt,
)
from nearfar.edge_runtime.openai.records import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Logprobs,
    Message,
    PromptTokensDetails,
    TokenLogprob,
    Usage,
)
from nearfar.edge_runtime.snapshots import Progress, Snapshot
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError
from nearfar.format.manifest import Manifest

Chunk = TypeVar("Chunk")


class AsyncStream(Generic[Chunk]):
    """Chunks as they come. Closing it stops the request; so does dropping it."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await self._chunks.__anext__()

    async def close(self) -> None:
        """Stop the request."""
        await self._chunks.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncEngine:
    """A model on a device. All requests share its cache and its steps."""

    def __init__(self, core: EngineCore, codec: TextCodec) -> None:
        self.core = core
        self.codec = codec
        model = core.manifest.model
        self.grammars = Grammars(codec, model.vocab_size, model.eos_token_ids)
        self.chat = Chat(self)
        self.completions = Completions(self)

    @classmethod
    async def load(cls, path: str | Path, **options: Unpack[LoadKeywords]) -> AsyncEngine:
        """Load an artifact, or the best target of a directory of artifacts. The options are those of
        LoadOptions.

        `device`: a kind of device (`nearfar devices` lists them) or "auto"; "KIND:1" or "KIND:radeon" for one
        of several. `kv_memory`: bytes for the KV cache, such as "512MB"; default half of what is free.
        `threads`: cpu threads, default one a core, within the quota of the container. `verify`: check the
        SHA-256 of every file first. `kv_bits`: keep the KV cache in so many bits a value, where the device
        can; default as the program computes. `precision`: "f16" or "f32"; default the best that the device
        has. `program`: a program by its name. `debug`: check every call with the driver's validation layer,
        where it has one (slow). `trust`: run the native code of an artifact that was not built here, now and
        later (docs/artifact.md).
        """
        return cls(*await asyncio.to_thread(load, Path(path), LoadOptions(**options)))

    @property
    def manifest(self) -> Manifest:
        """What the artifact says about the model."""
        return self.core.manifest

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.core.context

    def generate(self, tokens: Seq[int], params: SamplingParams | None = None) -> Generation:
        """Token ids in, token events out."""
        return self.core.generate(tokens, params)

    async def save_cache(
        self,
        path: str | Path,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        prompt: str | None = None,
        tokens: Seq[int] | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Save the keys and values of a prompt's beginning, computed first if need be: docs/snapshots.md.

        One of `messages` (the beginning of a conversation, such as its system prompt), `prompt` (the
        beginning of a raw prompt), `tokens`. `force`: overwrite a file that is not a snapshot.
        `progress(done, total)`: bytes written, from another thread. SnapshotError where the file cannot be
        written, RequestError for a prompt too short (under a page) or too long.
        """
        return await snapshots.save(
            self.core, self.codec, _path(path), messages, prompt, tokens, force, progress
        )

    async def load_cache(self, path: str | Path, *, progress: Progress | None = None) -> Snapshot:
        """Put a snapshot into the cache, where prompts that begin with its tokens find it, as after a request
        with them.

        SnapshotError, and nothing has changed, where it is damaged, of another model, or does not fit the
        cache.
        """
        return await snapshots.load(self.core, _path(path), progress)

    async def close(self) -> None:
        """Stop all requests and free the device."""
        self.grammars.close()
        await self.core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Chat:
    """`engine.chat`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.completions = ChatCompletions(engine)


class ChatCompletions:
    """`engine.chat.completions`."""

    def __init__(self, engine: AsyncEngine) -> None:
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
        sampling, n, usage = chat_sampling(params), choices(params), include_usage(params)
        grammar = asked_grammar(params)
        check_model(params, self._engine.manifest.model.name)
        given = checked_messages(messages)
        goes_on = continues_last(params, given)
        tokens = self._engine.codec.encode_chat(given, continue_last=goes_on)
        context = tokens if goes_on else ()
        response = await _Response.start(self._engine, "chatcmpl", tokens, context, sampling, n, grammar)
        if stream:
            return AsyncStream(_chat_chunks(response, usage))
        return await _chat_whole(response)


class Completions:
    """`engine.completions`."""

    def __init__(self, engine: AsyncEngine) -> None:
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
        """Continue a text (an empty one: from BOS) or token ids, whole or in chunks."""
        sampling, n, usage = completion_sampling(params), choices(params), include_usage(params)
        grammar = asked_grammar(params)
        check_model(params, self._engine.manifest.model.name)
        tokens = self._engine.codec.encode(prompt) if isinstance(prompt, str) else token_prompt(prompt)
        if params.get("echo"):
            raise RequestError("echo is not supported", "echo")
        response = await _Response.start(self._engine, "cmpl", tokens, tokens, sampling, n, grammar)
        if stream:
            return AsyncStream(_completion_chunks(response, usage))
        return await _completion_whole(response)


@dataclass(frozen=True)
class _Response:
    """What all chunks of a response have in common, and its answers."""

    id: str
    created: int
    model: str
    answers: list[Answer]

    @classmethod
    async def start(
        cls,
        engine: AsyncEngine,
        kind: str,
        tokens: list[int],
        context: Seq[int],
        sampling: SamplingParams,
        n: int,
        grammar: Grammar | None,
    ) -> _Response:
        """Start the requests of a response. `context`: tokens that the text of the answers continues."""
        engine.core.check_open()
        constraints = await engine.grammars.constraints(grammar, n) if grammar else [None] * n
        answers = []
        for index in range(n):
            seed = None if sampling.seed is None else _nth_seed(sampling.seed, index)
            generation = engine.core.generate(tokens, replace(sampling, seed=seed), constraints[index])
            answers.append(
                Answer(index, generation, engine.codec, sampling.stop, context, constraints[index])
            )
        return cls(f"{kind}-{secrets.token_hex(12)}", int(time.time()), engine.manifest.model.name, answers)

    @property
    def head(self) -> dict[str, Any]:
        """Fields that every record of the response starts with."""
        return {"id": self.id, "created": self.created, "model": self.model}

    @property
    def tail(self) -> dict[str, Any]:
        """Usage and timings, once the answers are complete. The prompt counts once, however many answers
        it has.
        """
        stats = [answer.stats for answer in self.answers]
        prompt, generated = stats[0].prompt_tokens, sum(s.completion_tokens for s in stats)
        details = PromptTokensDetails(stats[0].cached_tokens)
        return {"usage": Usage(prompt, generated, prompt + generated, details), "timings": stats}

    async def collect(self) -> list[tuple[str, list[TokenLogprob], Literal["stop", "length"]]]:
        """Text, log-probabilities and finish reason of every answer."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        async with aclosing(merge(self.answers)) as merged:
            async for piece in merged:
                pieces[piece.index].append(piece)
        return [
            (
                "".join(p.text for p in of),
                [lp for p in of for lp in p.logprobs],
                of[-1].finish_reason or "length",
            )
            for of in pieces
        ]


async def _chat_whole(response: _Response) -> ChatCompletion:
    made = [
        Choice(index, Message(text), finish, Logprobs(logprobs) if logprobs else None)
        for index, (text, logprobs, finish) in enumerate(await response.collect())
    ]
    return ChatCompletion(**response.head, choices=made, **response.tail)


async def _chat_chunks(response: _Response, usage: bool) -> AsyncGenerator[ChatCompletionChunk, None]:
    head = response.head
    for answer in response.answers:
        yield ChatCompletionChunk(**head, choices=[ChunkChoice(answer.index, Delta("", "assistant"))])
    async with aclosing(merge(response.answers)) as pieces:
        async for piece in pieces:
            logprobs = Logprobs(list(piece.logprobs)) if piece.logprobs else None
            delta = Delta(piece.text) if piece.text else Delta()
            yield ChatCompletionChunk(
                **head, choices=[ChunkChoice(piece.index, delta, piece.finish_reason, logprobs)]
            )
    if usage:
        yield ChatCompletionChunk(**head, choices=[], **response.tail)


async def _completion_whole(response: _Response) -> Completion:
    made = [
        CompletionChoice(index, text, finish, _parallel(logprobs))
        for index, (text, logprobs, finish) in enumerate(await response.collect())
    ]
    return Completion(**response.head, choices=made, **response.tail)


async def _completion_chunks(response: _Response, usage: bool) -> AsyncGenerator[Completion, None]:
    async with aclosing(merge(response.answers)) as pieces:
        async for piece in pieces:
            choice = CompletionChoice(
                piece.index, piece.text, piece.finish_reason, _parallel(list(piece.logprobs))
            )
            yield Completion(**response.head, choices=[choice])
    if usage:
        yield Completion(**response.head, choices=[], **response.tail)


def _parallel(logprobs: list[TokenLogprob]) -> CompletionLogprobs | None:
    if not logprobs:
        return None
    offsets = [sum(len(before.token) for before in logprobs[:i]) for i in range(len(logprobs))]
    top = [{other.token: other.logprob for other in item.top_logprobs} for item in logprobs]
    return CompletionLogprobs([i.token for i in logprobs], [i.logprob for i in logprobs], top, offsets)


def _path(path: str | Path) -> Path:
    return Path(path).expanduser()


def _nth_seed(seed: int, index: int) -> int:
    """Seeds of the answers of one response: all different, the first as given."""
    return (seed + index) & (2**64 - 1)
