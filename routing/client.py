"""The hybrid client: OpenAI's chat completions over a device and a cloud."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, overload

from nearfar.edge_runtime.openai.api import AsyncEngine
from nearfar.edge_runtime.openai.pieces import Piece as Answered
from nearfar.edge_runtime.openai.pieces import delta_of, joined, message_of
from nearfar.edge_runtime.openai.records import Choice, ChoiceDelta, ChoiceLogprobs, ChunkChoice, TokenLogprob
from nearfar.edge_runtime.openai.stream import AsyncStream
from nearfar.edge_runtime.openai.sync import Engine, LoopThread, Stream
from nearfar.errors import RequestError
from nearfar.routing.device import EngineDevice
from nearfar.routing.difficulty import score
from nearfar.routing.endpoint import Endpoint, EndpointSide
from nearfar.routing.fitted import FittedRouter
from nearfar.routing.policy import RECORD, Policy
from nearfar.routing.request import hints_of
from nearfar.routing.router import Device, Router
from nearfar.routing.run import HybridAnswer
from nearfar.routing.shapes import ChatCompletion, ChatCompletionChunk, UsagePiece

Messages = Seq[Mapping[str, Any]]
ENGLISH: Literal["english"] = "english"


class AsyncHybridClient:
    """Answers from the device when it can, from the cloud when it must. Use it on one event loop.

    `device`: an AsyncEngine, the path of an artifact, or the address of a server on this machine (a URL or an
    Endpoint). `cloud`: any OpenAI-compatible URL, or an Endpoint with its key, model and prices. One of them
    may be missing. `difficulty`: a function that scores a prompt in [0, 1]; hard prompts go to the cloud.
    "english" is the package's own model, which knows only English and only surface features of a prompt. With
    None, no prompt goes to the cloud for its difficulty; Policy(router=FILE) decides by a fitted router
    instead. `state`: a JSON file that keeps costs, the calibrated threshold and speeds; marks of private
    texts are kept in FILE.private. `records`: a JSONL file for decision records.
    """

    def __init__(
        self,
        *,
        device: AsyncEngine | Endpoint | str | Path | None = None,
        cloud: Endpoint | str | None = None,
        policy: Policy | None = None,
        difficulty: Callable[[str], float] | Literal["english"] | None = None,
        state: str | Path | None = None,
        records: str | Path | None = None,
    ) -> None:
        policy = Policy() if policy is None else policy
        if not isinstance(policy, Policy):
            raise RequestError(
                f"policy must be a Policy, such as Policy(mode='auto'), not {policy!r:.80}", "policy"
            )
        if device is None and cloud is None:
            raise RequestError("give the client a device, a cloud, or both", "device")
        self.router = Router(
            _device(device, policy), None if cloud is None else _cloud(cloud, policy), policy,
            _scorer(difficulty), _path(state), _path(records),
            fitted=_fitted(policy.router, difficulty, device),
        )  # fmt: skip
        self.chat = _AsyncChat(self.router)

    async def close(self) -> None:
        """Save the state, close connections, and free a device that was loaded here."""
        await self.router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _AsyncChat:
    """`client.chat`."""

    def __init__(self, router: Router) -> None:
        self.completions = AsyncCompletions(router)


class AsyncCompletions:
    """`client.chat.completions`."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[False] = False, **params: Any
    ) -> ChatCompletion: ...
    @overload
    async def create(
        self, messages: Messages, *, stream: Literal[True], **params: Any
    ) -> AsyncStream[ChatCompletionChunk]: ...
    @overload
    async def create(
        self, messages: Messages, *, stream: bool, **params: Any
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]: ...
    async def create(
        self, messages: Messages, *, stream: bool = False, **params: Any
    ) -> ChatCompletion | AsyncStream[ChatCompletionChunk]:
        """Answer a conversation, whole or in chunks, with OpenAI's parameters.

        `x_nearfar`: mode, private, conversation, expected_tokens of this request (also inside `extra_body`,
        and private in a message). A text that has been private stays private in later requests that carry or
        quote it. Raises RequestError, OverloadError (`retry_after`) or EngineError, with all reasons, where
        neither side can answer.
        """
        asked = hints_of(messages, params)
        plan = await self._router.plan(asked)
        run = HybridAnswer(self._router, plan, streamed=stream)
        usage = bool((asked.params.get("stream_options") or {}).get("include_usage"))
        return await _Begun.start(_chunks(run, usage)) if stream else await _whole(run)


class HybridClient:
    """`AsyncHybridClient` for synchronous code; usable from several threads. A `device` may be an Engine: the
    client then runs on its event loop.
    """

    def __init__(
        self,
        *,
        device: Engine | AsyncEngine | Endpoint | str | Path | None = None,
        cloud: Endpoint | str | None = None,
        policy: Policy | None = None,
        difficulty: Callable[[str], float] | Literal["english"] | None = None,
        state: str | Path | None = None,
        records: str | Path | None = None,
    ) -> None:
        self._own = None if isinstance(device, Engine) else LoopThread()
        self._loop = device.loop if isinstance(device, Engine) else self._own
        assert self._loop is not None
        inner = device.asynchronous if isinstance(device, Engine) else device

        async def make() -> AsyncHybridClient:
            return AsyncHybridClient(
                device=inner,
                cloud=cloud,
                policy=policy,
                difficulty=difficulty,
                state=state,
                records=records,
            )

        try:
            self.asynchronous = self._loop.run(make())
        except BaseException:
            if self._own is not None:
                self._own.stop()
            raise
        self._closed = False
        self.chat = _Chat(self._loop, self.asynchronous)

    def close(self) -> None:
        """See AsyncHybridClient.close."""
        if not self._closed:
            self._closed = True
            assert self._loop is not None
            self._loop.run(self.asynchronous.close())
            if self._own is not None:
                self._own.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Chat:
    """`client.chat`."""

    def __init__(self, loop: LoopThread, client: AsyncHybridClient) -> None:
        self.completions = HybridCompletions(loop, client)


class HybridCompletions:
    """`client.chat.completions`."""

    def __init__(self, loop: LoopThread, client: AsyncHybridClient) -> None:
        self._loop, self._client = loop, client

    @overload
    def create(
        self, messages: Messages, *, stream: Literal[False] = False, **params: Any
    ) -> ChatCompletion: ...
    @overload
    def create(
        self, messages: Messages, *, stream: Literal[True], **params: Any
    ) -> Stream[ChatCompletionChunk]: ...
    def create(
        self, messages: Messages, *, stream: bool = False, **params: Any
    ) -> ChatCompletion | Stream[ChatCompletionChunk]:
        """See AsyncCompletions.create."""
        made = self._loop.run(self._client.chat.completions.create(messages, stream=stream, **params))
        return Stream(self._loop, made, made.close()) if isinstance(made, AsyncStream) else made


class _Begun(AsyncStream[ChatCompletionChunk]):
    """A stream whose first chunk has come already, so that `create` raises errors before it.

    Also, a generator that has begun can be closed; one that has not would keep its reservation in the budget.
    """

    @classmethod
    async def start(cls, chunks: AsyncGenerator[ChatCompletionChunk, None]) -> _Begun:
        """Wait for the first chunk."""
        made = cls(chunks)
        made._first = await anext(chunks, None)
        return made

    _first: ChatCompletionChunk | None = None

    async def __anext__(self) -> ChatCompletionChunk:
        first, self._first = self._first, None
        return first if first is not None else await super().__anext__()


async def _chunks(run: HybridAnswer, usage: bool) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Yield the chunks of a response. The last piece waits until the costs are known, so that its chunk can
    have them.
    """
    head = _head(run)
    begun, last = False, None
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            if not begun:
                begun = True
                first = ChunkChoice(0, ChoiceDelta("", "assistant"))
                yield ChatCompletionChunk(**head, choices=[first], x_nearfar=run.provenance(whole=False))
            if piece.finish is None:
                yield ChatCompletionChunk(**head, choices=[_choice(run, piece)])
            else:
                last = piece
    made = run.provenance(whole=True)
    if last is not None:
        yield ChatCompletionChunk(**head, choices=[_choice(run, last)], x_nearfar=made)
    if usage:
        yield ChatCompletionChunk(**head, choices=[], usage=run.usage, x_nearfar=made)


async def _whole(run: HybridAnswer) -> ChatCompletion:
    head = _head(run)
    pieces: list[UsagePiece] = []
    async with aclosing(run.pieces()) as coming:
        async for piece in coming:
            pieces.append(piece)
    whole = joined(0, pieces)
    tokens = _logprobs(run, whole)
    logprobs = ChoiceLogprobs(tokens) if tokens else None
    choice = Choice(0, message_of(whole), whole.finish or "stop", logprobs)
    return ChatCompletion(**head, choices=[choice], usage=run.usage, x_nearfar=run.provenance(whole=True))


def _head(run: HybridAnswer) -> dict[str, Any]:
    model = run.plan.call.params.get("model") or "hybrid"
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": str(model)}


def _choice(run: HybridAnswer, piece: UsagePiece) -> ChunkChoice:
    logprobs = _logprobs(run, piece)
    return ChunkChoice(0, delta_of(piece), piece.finish, ChoiceLogprobs(logprobs) if logprobs else None)


def _logprobs(run: HybridAnswer, piece: Answered) -> list[TokenLogprob]:
    """The log-probabilities that the caller requested; the monitor may have requested more."""
    top = run.plan.call.top_logprobs
    return (
        []
        if top is None
        else [replace(item, top_logprobs=item.top_logprobs[:top]) for item in piece.logprobs]
    )


def _device(given: AsyncEngine | Endpoint | str | Path | None, policy: Policy) -> Device | None:
    """Make the device. An address must be this machine's, since private requests go there. Raises
    RequestError for others.
    """
    if given is None:
        return None
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        given = Endpoint(given)
    if isinstance(given, Endpoint):
        if not given.local:
            raise RequestError(
                f"the device's address must be this machine (localhost, 127.0.0.1, ::1), not {given.url}",
                "device",
            )
        return EndpointSide(given, policy.timeouts, use_key=False)
    if isinstance(given, Engine):
        raise RequestError(
            "an Engine belongs to HybridClient; give AsyncHybridClient an AsyncEngine", "device"
        )
    return EngineDevice(given, policy.timeouts)


def _cloud(given: Endpoint | str, policy: Policy) -> EndpointSide:
    return EndpointSide(Endpoint(given) if isinstance(given, str) else given, policy.timeouts)


def _scorer(given: Callable[[str], float] | Literal["english"] | None) -> Callable[[str], float] | None:
    if given is None or callable(given):
        return given
    if given != ENGLISH:
        raise RequestError(
            f"difficulty must be a function, {ENGLISH!r} (the package's own model) or None, not {given!r}",
            "difficulty",
        )
    return score


def _fitted(
    router: Mapping[str, Any] | Path | str | None, difficulty: object, device: object
) -> FittedRouter | Literal["record"] | None:
    """Load a fitted router. RequestError beside `difficulty`, or without a model on this device."""
    if router is None:
        return None
    if difficulty is not None:
        raise RequestError("give one of Policy(router=…) and difficulty", "router")
    address = isinstance(device, str) and device.startswith(("http://", "https://"))
    if device is None or isinstance(device, Endpoint) or address:
        raise RequestError(
            "a router looks at the device's own model: give an artifact or an Engine", "router"
        )
    if isinstance(router, Mapping):
        return FittedRouter.parse(dict(router))
    return RECORD if router == RECORD else FittedRouter.load(Path(router).expanduser())


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser()
