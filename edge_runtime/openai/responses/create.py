"""`engine.responses`: OpenAI's Responses API on the device."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Any, Literal, Unpack, cast, overload

from nearfar.edge_runtime.openai.answers import merge
from nearfar.edge_runtime.openai.chat import ChatCompletions
from nearfar.edge_runtime.openai.parameters import ChatParams
from nearfar.edge_runtime.openai.records import Record
from nearfar.edge_runtime.openai.response import RunningResponse as Answering
from nearfar.edge_runtime.openai.responses.asking import chat_of
from nearfar.edge_runtime.openai.responses.checks import ResponseParams, checked
from nearfar.edge_runtime.openai.responses.kept import KeptResponses
from nearfar.edge_runtime.openai.responses.shape import ResponseRecords, TokenCounts, new_id
from nearfar.edge_runtime.openai.stream import AsyncStream

KEPT, KEPT_BYTES = 64, 4 << 20
"""The most responses, and bytes of them, that an engine keeps for `previous_response_id`."""
OWNER = ""
"""The engine is the only owner of its responses."""


class Fields(Record):
    """A JSON object with attribute access, as in OpenAI's client; a field that is missing raises
    AttributeError.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", {})
        if name not in fields:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(fields)}")
        return _wrapped(fields[name])

    def model_dump(self) -> dict[str, Any]:
        """The object as nested dictionaries."""
        return dict(self._fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fields!r})"


class Response(Fields):
    """A response: `id`, `status`, `output` (a list of items), `usage` and the fields of its request."""

    @property
    def output_text(self) -> str:
        """The text of all messages of the response."""
        parts = (part for item in self._fields["output"] for part in item.get("content", ()))
        return "".join(part["text"] for part in parts if part["type"] == "output_text")


class ResponseEvent(Fields):
    """An event of a stream: `type`, `sequence_number` and the fields of its type."""


class Responses:
    """`engine.responses`."""

    def __init__(self, chat: ChatCompletions) -> None:
        self._chat = chat
        self._kept = KeptResponses(KEPT, KEPT_BYTES)

    @overload
    async def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: Literal[False] = False,
        **params: Unpack[ResponseParams],
    ) -> Response: ...
    @overload
    async def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: Literal[True],
        **params: Unpack[ResponseParams],
    ) -> AsyncStream[ResponseEvent]: ...
    @overload
    async def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: bool,
        **params: Unpack[ResponseParams],
    ) -> Response | AsyncStream[ResponseEvent]: ...
    async def create(
        self,
        input: str | Seq[Mapping[str, Any]] | None = None,
        *,
        stream: bool = False,
        **params: Unpack[ResponseParams],
    ) -> Response | AsyncStream[ResponseEvent]:
        """Answer a text or items (messages, calls and their results, reasoning), whole or in events.

        The newest 64 responses, 4 MiB at most, stay in memory for `previous_response_id` and items by
        reference, unless `store` is false. RequestError for fields and types that an engine cannot follow.
        """
        body = checked({"input": input, "stream": stream, **params})
        body["input"] = self._kept.resolved(OWNER, body.get("input"))
        before = self._kept.messages(OWNER, body.get("previous_response_id"))
        policy = body.pop("context_policy", None)
        answering = await self._chat.start(*_asked(body, before, policy))
        stored = body.get("store") is not False

        def told(record: dict[str, Any]) -> None:
            if stored:
                self._kept.keep(OWNER, record, body, before)

        records = ResponseRecords(new_id("resp"), answering.model, body, stored, told)
        if stream:
            return AsyncStream(_events(answering, records), answering.aclose)
        pieces = await answering.collect()
        return Response(records.whole(pieces, _counts(answering)))


def _asked(body: Mapping[str, Any], before: Seq[Any], policy: Any) -> tuple[list[Any], ChatParams]:
    """Return the messages and the parameters of the chat completion, with effort and verbosity as template
    variables.
    """
    chat = chat_of(body, before)
    names = ("reasoning_effort", "verbosity")
    hints: dict[str, Any] = {name: chat.pop(name) for name in names if name in chat}
    if hints.get("reasoning_effort") == "none":
        hints |= {"enable_thinking": False, "thinking": False}
    chat.pop("stream", None)
    if hints:
        chat["chat_template_kwargs"] = {**hints, **chat.get("chat_template_kwargs", {})}
    params = {**chat, "model": body.get("model"), "user": body.get("user"), "context_policy": policy}
    return params.pop("messages"), cast(ChatParams, params)


async def _events(answering: Answering, records: ResponseRecords) -> AsyncGenerator[ResponseEvent, None]:
    for event in records.begin():
        yield ResponseEvent(event)
    async with aclosing(merge(answering.answers)) as pieces:
        async for piece in pieces:
            for event in records.piece(piece):
                yield ResponseEvent(event)
    for event in records.end(_counts(answering)):
        yield ResponseEvent(event)


def _counts(answering: Answering) -> TokenCounts:
    stats = answering.answers[0].stats
    return TokenCounts(stats.prompt_tokens, stats.completion_tokens, stats.cached_tokens)


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Response(value) if value.get("object") == "response" else Fields(value)
    return [_wrapped(each) for each in value] if isinstance(value, list) else value
