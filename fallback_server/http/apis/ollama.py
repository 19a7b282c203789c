"""Ollama's API: the requests of /api/chat, /api/generate and /api/embed, and their form as chat
completions.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nearfar.edge_runtime.openai.responses.asking import with_one_system
from nearfar.fallback_server.http.apis.asking import Record, skip
from nearfar.fallback_server.http.fields import (
    HINT,
    SILENT,
    AnyJson,
    Inputs,
    JsonObject,
    Name,
    Only,
    Strict,
    few,
    many,
    within,
)
from nearfar.fallback_server.http.schemas import MAX_MESSAGES, ModelName, SamplingFields, concerning
from nearfar.format.requests import MAX_TOOLS

NO_IMAGES = "this server reads no images"
STAYS = Only((-1, "-1"), "models stay loaded until the server ends")
KeepAlive = Annotated[Any, STAYS, SILENT]
"""How long a model stays loaded after the request; a negative time means forever."""


class Options(SamplingFields):
    """Sampling options under llama.cpp's names. Options for loading a model are set when the server
    starts.
    """

    place = "options."
    repeat_penalty: float | None = within("repetition_penalty")
    num_predict: int | None = Field(None, ge=-2, le=2**31 - 1)

    @property
    def chat(self) -> Record:
        """The options in a chat completion's form."""
        limit = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        same = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {**same, "repetition_penalty": self.repeat_penalty, "max_completion_tokens": limit}


NOTHING = Options.model_validate({})


class CalledFunction(Strict):
    """A function that the model called; Ollama's arguments are an object."""

    place = "messages.tool_calls.function."
    name: Name
    arguments: AnyJson = None
    index: Annotated[int | None, SILENT] = None


class OllamaCall(Strict):
    """A call of an earlier answer."""

    place = "messages.tool_calls."
    function: CalledFunction
    id: Annotated[str, Field(max_length=128)] | None = None
    type: Annotated[str | None, SILENT] = None


class OllamaMessage(Strict):
    """A message of a conversation."""

    place = "messages."
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None
    images: Annotated[Any, Only(([],), instead=NO_IMAGES)] = None


class OllamaFunction(Strict):
    """A function that may be called."""

    place = "tools.function."
    name: Name
    description: str | None = None
    parameters: JsonObject | None = None


class OllamaTool(Strict):
    """A tool that may be called."""

    place = "tools."
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaFields(Strict):
    """The fields that /api/chat and /api/generate share."""

    model: ModelName = None
    stream: bool | None = None
    format: Literal["json", ""] | JsonObject | None = None
    options: Options | None = None
    think: Annotated[bool | Annotated[str, Field(max_length=32)] | None, HINT] = None
    keep_alive: KeepAlive = None

    def fields(self) -> Record:
        """Return the shared fields in a chat completion's form."""
        form: Record | None = None
        if self.format == "json":
            form = {"type": "json_object"}
        elif isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}
        return {**(self.options or NOTHING).chat, "response_format": form, "think": self.think}


class ChatBody(OllamaFields):
    """/api/chat."""

    messages: Annotated[list[OllamaMessage], many(MAX_MESSAGES), few(MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None

    @property
    def chat(self) -> Record:
        """The fields of a chat completion."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        messages = with_one_system(messages_of(self.messages or []))
        return {**self.fields(), "messages": messages, "tools": tools or None}


class GenerateBody(OllamaFields):
    """/api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Only(("",))] = None
    template: Annotated[Any, Only(("",))] = None
    context: Annotated[Any, Only(([],), instead="use /api/chat for a conversation")] = None
    images: Annotated[Any, Only(([],), instead=NO_IMAGES)] = None

    @model_validator(mode="after")
    def _raw_alone(self) -> GenerateBody:
        if self.raw and self.system:
            raise concerning("system", "raw: true sends the prompt as it is, without system: leave one out")
        if self.raw and self.think is not None:
            skip("think")  # a raw prompt has no chat template
        return self

    @property
    def chat(self) -> Record:
        """The fields of a chat completion of one question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.fields(), "messages": [*system, {"role": "user", "content": self.prompt or ""}]}


class EmbedBody(Strict):
    """/api/embed."""

    model: ModelName = None
    input: Inputs
    dimensions: int | None = Field(None, ge=1, le=65536)
    truncate: Annotated[bool | None, SILENT] = None
    options: Annotated[JsonObject | None, SILENT] = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(Strict):
    """/api/embeddings, the older form: one text."""

    model: ModelName = None
    prompt: str
    options: Annotated[JsonObject | None, SILENT] = None
    keep_alive: KeepAlive = None


class NamedBody(Strict):
    """/api/show."""

    model: ModelName = None
    name: ModelName = None
    verbose: Annotated[bool | None, SILENT] = None


def messages_of(given: list[OllamaMessage]) -> list[Record]:
    """Convert the messages to a chat completion's. Ollama's calls need no ids: results follow their calls in
    order.
    """
    made: list[Record] = []
    waiting: list[str] = []
    for message in given:
        record: Record = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            name = message.tool_call_id or (waiting.pop(0) if waiting else f"call_{secrets.token_hex(8)}")
            record["tool_call_id"] = name
        if message.thinking:
            record["reasoning_content"] = message.thinking
        if message.tool_calls:
            record["tool_calls"] = [_call(call) for call in message.tool_calls]
            waiting = [call["id"] for call in record["tool_calls"]]
        made.append(record)
    return made


def _call(call: OllamaCall) -> Record:
    given = call.function.arguments
    text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": text}
    return {"id": call.id or f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
