"""OpenAI's Responses API: its requests, and their form as chat completions.

Items become messages: a model's reasoning and calls become part of the message of their answer. Tools of a
namespace become functions whose name joins both names. Types of tools and items that this server cannot run
or read are skipped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from nearfar.fallback_server.http.apis.asking import Record, known_of, present, skip, with_one_system
from nearfar.fallback_server.http.fields import (
    HINT,
    MAX_PARTS,
    PASSED,
    SILENT,
    JsonObject,
    Name,
    Only,
    Strict,
    few,
    many,
)
from nearfar.fallback_server.http.schemas import (
    MAX_MESSAGES,
    FunctionSpec,
    ModelName,
    SamplingFields,
    SilentFields,
    TemplateVariables,
)
from nearfar.format.requests import MAX_TOOLS
from nearfar.format.sizes import TOP_LOGPROBS

ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that this server supports."""
SHARED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stream", "parallel_tool_calls", "priority", "cache_salt", "chat_template_kwargs",
)  # fmt: skip
"""Fields with the same name in a chat completion."""


class InputPart(Strict):
    """A part of an item's content: text, or images and files for upstreams that read them."""

    place = "input.content."
    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[Any, PASSED] = None
    detail: Annotated[Any, PASSED] = None
    file_id: Annotated[Any, PASSED] = None
    file_url: Annotated[Any, PASSED] = None
    file_data: Annotated[Any, PASSED] = None
    filename: Annotated[Any, PASSED] = None
    input_audio: Annotated[Any, PASSED] = None

    @property
    def chat(self) -> Record:
        """The part in a chat completion's form, whose own checks reject other kinds."""
        if self.type in TEXTS:
            return {"type": "text", "text": self.text}
        if self.type == "refusal":
            return {"type": "refusal", "refusal": self.refusal}
        if self.type == "input_image" and isinstance(self.image_url, str):
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        return {"type": self.type}


Parts = Annotated[list[InputPart], many(MAX_PARTS), few(MAX_PARTS)]


def _content(given: str | list[InputPart]) -> str | list[Record]:
    """Convert parts to the content of a chat message: one string where there is text alone."""
    if isinstance(given, str):
        return given
    parts = [part.chat for part in given]
    if all(part["type"] == "text" and isinstance(part["text"], str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


class MessageItem(Strict):
    """A message of the conversation."""

    place = "input."
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: Annotated[str | None, SILENT] = None
    status: Annotated[str | None, SILENT] = None


class CallItem(Strict):
    """A call of an earlier answer."""

    place = "input."
    type: Literal["function_call"]
    call_id: str = Field(max_length=128)
    name: Name
    arguments: str
    namespace: Name | None = None
    id: Annotated[str | None, SILENT] = None
    status: Annotated[str | None, SILENT] = None


class ResultItem(Strict):
    """The result of a call."""

    place = "input."
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=128)
    output: str | Parts
    id: Annotated[str | None, SILENT] = None
    status: Annotated[str | None, SILENT] = None


class ReasoningItem(Strict):
    """The model's reasoning before an earlier answer."""

    place = "input."
    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    id: Annotated[str | None, SILENT] = None
    status: Annotated[str | None, SILENT] = None
    encrypted_content: Annotated[str | None, SILENT] = None


class ReferenceItem(Strict):
    """A reference to an item of an earlier response by its id; always rejected."""

    place = "input."
    type: Literal["item_reference"]
    id: str

    @model_validator(mode="after")
    def _refused(self) -> ReferenceItem:
        raise ValueError("items are not kept one by one: send the item itself, or previous_response_id")


def _kind(item: Any) -> str | None:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given if isinstance(given, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind),
]


class FunctionTool(FunctionSpec):
    """A function that may be called, with a chat completion's fields beside its type."""

    place = "tools."
    type: Literal["function"]

    def chat(self, namespace: str = "") -> Record:
        """Return the tool as a chat completion has it."""
        fields = present(description=self.description, parameters=self.parameters, strict=self.strict)
        return {"type": "function", "function": {"name": joined(namespace, self.name), **fields}}


class NamespaceTool(Strict):
    """Functions that belong together."""

    place = "tools."
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[FunctionTool], many(MAX_TOOLS), few(MAX_TOOLS)]

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, given: Any) -> Any:
        return known_of(given, "tools.tools", ("function",))


ToolItem = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class NamedFunction(Strict):
    """A function that must be, or may be, called."""

    place = "tool_choice."
    type: Literal["function"]
    name: Name
    namespace: Name | None = None


class AllowedTools(Strict):
    """The functions of which the model may call any; with mode "required" it must call one."""

    place = "tool_choice."
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], many(MAX_TOOLS), few(MAX_TOOLS)]


class TextFormat(Strict):
    """The format of the answer: text, any JSON object, or a JSON schema."""

    place = "text.format."
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Name | None, SILENT] = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: Annotated[str | None, SILENT] = None
    strict: bool | None = None

    @property
    def chat(self) -> Record:
        """The format in a chat completion's form."""
        if self.type != "json_schema":
            return {"type": self.type}
        fields = present(schema=self.schema_, description=self.description, strict=self.strict)
        return {"type": "json_schema", "json_schema": {"name": self.name or "answer", **fields}}


class TextOptions(Strict):
    """The format and the verbosity of the answer's text."""

    place = "text."
    format: TextFormat | None = None
    verbosity: Annotated[str | None, Field(max_length=32), HINT] = None


class Reasoning(Strict):
    """The effort of thinking. Summaries are not made: the answer has the full reasoning."""

    place = "reasoning."
    effort: Annotated[str | None, Field(max_length=32), HINT] = None
    summary: Annotated[str | None, SILENT] = None
    generate_summary: Annotated[str | None, SILENT] = None


class StreamOptions(Strict):
    """Options of a stream. The obfuscation that clients may turn off is never added here."""

    place = "stream_options."
    include_obfuscation: Annotated[bool | None, SILENT] = None


class ResponseRequest(SamplingFields, SilentFields):
    """/v1/responses."""

    model: ModelName = None
    input: str | Annotated[list[Item], many(MAX_MESSAGES), few(MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ToolItem], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    include: Annotated[list[str], many(64), few(64)] | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    chat_template_kwargs: TemplateVariables | None = None
    user: Annotated[str | None, Field(max_length=512), SILENT] = None
    background: Annotated[Any, Only((False,))] = None
    conversation: Annotated[Any, Only(instead="send the items, or previous_response_id")] = None
    prompt: Annotated[Any, Only(instead="send the text itself as input")] = None
    truncation: Annotated[Any, Only(("disabled",))] = None
    max_tool_calls: Annotated[Any, SILENT] = None

    @field_validator("input", mode="before")
    @classmethod
    def _readable(cls, given: Any) -> Any:
        return known_of(given, "input", ITEMS)

    @field_validator("tools", mode="before")
    @classmethod
    def _runnable(cls, given: Any) -> Any:
        return known_of(given, "tools", ("function", "namespace"))

    @field_validator("include")
    @classmethod
    def _included(cls, given: list[str] | None) -> list[str] | None:
        for name in given or ():
            if name != LOGPROBS:
                skip(f"include.{name}")
        return given

    @property
    def functions(self) -> dict[str, tuple[str | None, str]]:
        """The namespace and the name of each function, by the joined name that the model sees."""
        found: dict[str, tuple[str | None, str]] = {}
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                found[tool.name] = (None, tool.name)
            else:
                found |= {joined(tool.name, each.name): (tool.name, each.name) for each in tool.tools}
        return found


def joined(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a function of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def chat_of(body: ResponseRequest, before: list[Record]) -> Record:
    """Return the request as the fields of a chat completion. `before`: the messages of the earlier
    responses.
    """
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages += [*before, *messages_of(body.input)]
    tools, choice = _tools(body)
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    text, reasoning = body.text or TextOptions(), body.reasoning or Reasoning()
    return {
        **{name: getattr(body, name) for name in SHARED},
        "messages": with_one_system(messages),
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": choice,
        "response_format": text.format.chat if text.format is not None else None,
        "verbosity": text.verbosity,
        "reasoning_effort": reasoning.effort,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs,
    }


def messages_of(given: str | list[Any] | None) -> list[Record]:
    """Convert items to messages of a chat."""
    if given is None or isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    made: list[Record] = []
    thoughts = ""
    for item in given:
        match item:
            case ReasoningItem():
                parts = item.content or item.summary or ()
                thoughts += "".join(part.text or "" for part in parts)
                continue
            case ResultItem():
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
                continue
            case CallItem():
                function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not made or made[-1]["role"] != "assistant" or thoughts:
                    made.append({"role": "assistant", "content": None})
                made[-1].setdefault("tool_calls", []).append(call)
            case MessageItem():
                made.append({"role": item.role, "content": _content(item.content)})
        if thoughts and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return made


def _tools(body: ResponseRequest) -> tuple[list[Record], Any]:
    """Return the tools and the tool choice in a chat completion's form."""
    tools = list[Record]()
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            tools.append(tool.chat())
        else:
            tools += [each.chat(tool.name) for each in tool.tools]
    match body.tool_choice:
        case NamedFunction() as named:
            return tools, {"type": "function", "function": {"name": joined(named.namespace, named.name)}}
        case AllowedTools() as allowed:
            names = {joined(each.namespace, each.name) for each in allowed.tools}
            return [tool for tool in tools if tool["function"]["name"] in names], allowed.mode
        case choice:  # chats accept "none" and "auto" without tools, and so do responses
            return tools, choice if tools or choice == "required" else None
