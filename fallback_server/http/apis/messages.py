"""Anthropic's Messages API: its requests, and their form as chat completions.

A message's blocks become messages of a chat. Tool results come before the user's text in the same message;
thoughts and calls of the model belong to the model's message. Tools that only Anthropic's servers run are
skipped.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from nearfar.edge_runtime.openai.responses.asking import present, with_one_system
from nearfar.fallback_server.http.apis.asking import Record, known_of
from nearfar.fallback_server.http.fields import (
    HINT,
    MAX_PARTS,
    PASSED,
    SILENT,
    AnyJson,
    JsonObject,
    Name,
    Parameters,
    Stop,
    Strict,
    few,
    many,
    within,
)
from nearfar.fallback_server.http.ignoring import computes
from nearfar.fallback_server.http.schemas import MAX_MESSAGES, CacheControl, ModelName, Thinking, concerning
from nearfar.format.requests import MAX_STOPS, MAX_TOOLS

BLOCKS = ("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking")
Citations = Annotated[list[AnyJson], many(MAX_PARTS), few(MAX_PARTS)] | JsonObject
"""The sources of a text, or whether a document may be cited."""


class Block(Strict):
    """A block of a message. Its type determines which fields it must have."""

    place = "messages.content."
    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    signature: Annotated[str | None, SILENT] = None
    data: Annotated[str | None, SILENT] = None
    id: Annotated[str, Field(max_length=128)] | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: Annotated[str, Field(max_length=128)] | None = None
    content: str | Annotated[list[Block], many(MAX_PARTS), few(MAX_PARTS)] | None = None
    is_error: bool | None = None
    source: Annotated[Any, PASSED] = None
    citations: Annotated[Citations | None, SILENT] = None
    cache_control: Annotated[CacheControl | None, SILENT] = None

    @field_validator("content", mode="wrap")
    @classmethod
    def _readable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(given, "messages.content", BLOCKS, handler)

    @model_validator(mode="after")
    def _complete(self) -> Block:
        needs = {
            "text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",),
            "image": ("source",),
        }.get(self.type, ())  # fmt: skip
        for name in needs:
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type!r} needs the field {name!r}")
        if self.type == "document":
            raise ValueError("documents are not read here: send their text")
        if self.type == "image" and computes.get():
            raise ValueError("only blocks of type 'text' are taken, not 'image'; this server reads no images")
        return self

    @property
    def chat(self) -> Record:
        """The block as a part of a chat message."""
        if self.type == "text":
            return {"type": "text", "text": self.text}
        source = self.source if isinstance(self.source, dict) else {}
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}


Blocks = Annotated[list[Block], many(MAX_PARTS), few(MAX_PARTS)]


class InputMessage(Strict):
    """A turn of the conversation."""

    place = "messages."
    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    @field_validator("content", mode="wrap")
    @classmethod
    def _readable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(given, "messages.content", BLOCKS, handler)


class SystemBlock(Strict):
    """A part of the system prompt."""

    place = "system."
    type: Literal["text"]
    text: str
    citations: Annotated[Citations | None, SILENT] = None
    cache_control: Annotated[CacheControl | None, SILENT] = None


class CustomTool(Strict):
    """A function that may be called."""

    place = "tools."
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: Annotated[CacheControl | None, SILENT] = None

    @property
    def chat(self) -> Record:
        """The tool in a chat completion's form."""
        fields = present(description=self.description, strict=self.strict)
        function = {"name": self.name, "parameters": self.input_schema, **fields}
        return {"type": "function", "function": function}


class ToolUse(Strict):
    """The `tool_choice`: whether tools may, must or must not be called."""

    place = "tool_choice."
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolUse:
        if self.type == "tool" and self.name is None:
            raise ValueError("type 'tool' needs the field 'name'")
        if self.type != "tool" and self.name is not None:
            raise ValueError(f"type '{self.type}' has no field 'name': type 'tool' calls the tool of a name")
        return self


class OutputFormat(Strict):
    """The schema of the answer."""

    place = "output_config.format."
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")
    name: Annotated[Name | None, SILENT] = None

    @property
    def chat(self) -> Record:
        """The format in a chat completion's form."""
        return {
            "type": "json_schema", "json_schema": {"name": self.name or "answer", "schema": self.schema_}
        }  # fmt: skip


class OutputConfig(Strict):
    """The effort of thinking, and the format of the answer."""

    place = "output_config."
    effort: Annotated[str | None, Field(max_length=32), HINT] = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """/v1/messages/count_tokens."""

    model: ModelName = None
    messages: Annotated[list[InputMessage], many(MAX_MESSAGES, 1), few(MAX_MESSAGES)]
    system: str | Annotated[list[SystemBlock], many(MAX_PARTS), few(MAX_PARTS)] | None = None
    tools: Annotated[list[CustomTool], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None
    tool_choice: ToolUse | None = None
    thinking: Annotated[Thinking | None, HINT] = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Annotated[CacheControl | None, SILENT] = None

    @field_validator("tools", mode="wrap")
    @classmethod
    def _runnable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(given, "tools", ("custom",), handler)

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        formats = (self.output_format, self.output_config.format if self.output_config else None)
        if None not in formats and formats[0] != formats[1]:
            raise concerning(
                "output_format", "output_format and output_config.format differ: give one of them"
            )
        return self


class Metadata(Strict):
    """What a client says of its user."""

    place = "metadata."
    user_id: str | None = None


class MessageRequest(CountRequest):
    """/v1/messages."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    stream: bool | None = None
    temperature: float | None = within("temperature")
    top_p: float | None = within("top_p")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    stop_sequences: Annotated[list[Stop], many(MAX_STOPS), few(MAX_STOPS)] | None = None
    metadata: Annotated[Metadata | None, SILENT] = None
    service_tier: Annotated[str | None, Field(max_length=32), SILENT] = None


def chat_of(body: CountRequest) -> Record:
    """Return the request as the fields of a chat completion."""
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    form = config.format or body.output_format
    made: Record = {
        "messages": with_one_system([*_system(body.system), *messages_of(body.messages)]),
        "tools": [tool.chat for tool in body.tools or ()] or None,
        "response_format": form.chat if form is not None else None,
        "thinking": body.thinking.model_dump(exclude_none=True) if body.thinking is not None else None,
        "reasoning_effort": config.effort,
    }
    # Anthropic takes "auto" and "none" without tools; a chat refuses a choice that needs tools.
    if choice is not None and (body.tools or choice.type in ("any", "tool")):
        named = {"type": "function", "function": {"name": choice.name}}
        made["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        made["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if isinstance(body, MessageRequest):
        made |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "stream")}
        made |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    if body.messages[-1].role == "assistant" and body.messages[-1].content:
        made["continue_final_message"] = True  # Anthropic's way to begin an answer
    return made


def _system(given: str | list[SystemBlock] | None) -> list[Record]:
    texts = [given] if isinstance(given, str) else [block.text for block in given or ()]
    return [{"role": "system", "content": "\n\n".join(texts)}] if any(texts) else []


def messages_of(given: list[InputMessage]) -> list[Record]:
    """Convert the turns to messages of a chat."""
    made: list[Record] = []
    for message in given:
        blocks = message.content
        if isinstance(blocks, str):
            made.append({"role": message.role, "content": blocks})
        elif message.role == "assistant":
            made.append(_assistant(blocks))
        else:
            made += [_result(block) for block in blocks if block.type == "tool_result"]
            if said := [block for block in blocks if block.type in ("text", "image")]:
                made.append({"role": message.role, "content": _content(said)})
    return made


def _content(blocks: list[Block]) -> str | list[Record]:
    """Convert text and image blocks to a message's content: one string where there is text alone."""
    if all(block.type == "text" for block in blocks):
        return "\n".join(block.text or "" for block in blocks)
    return [block.chat for block in blocks]


def _assistant(blocks: list[Block]) -> Record:
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    text = "".join(block.text or "" for block in blocks if block.type == "text")
    calls = [
        {
            "id": block.id, "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks if block.type == "tool_use"
    ]  # fmt: skip
    content = text or (None if calls else "")
    said = present(reasoning_content=thoughts or None, tool_calls=calls or None)
    return {"role": "assistant", "content": content, **said}


def _result(block: Block) -> Record:
    """Convert the result of a call. A chat has no field for failure, so the text of a failed call begins with
    "Error".
    """
    inner = block.content
    content = inner if isinstance(inner, str) else _content(list(inner or ()))
    if block.is_error and isinstance(content, str):
        content = content if content.lower().startswith("error") else f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
