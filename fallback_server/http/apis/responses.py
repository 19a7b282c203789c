"""OpenAI's Responses API: its requests, checked.

Types of tools and items that this server cannot run or read are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, ValidatorFunctionWrapHandler, field_validator, model_validator

from nearfar.edge_runtime.openai.responses.asking import ITEMS, LOGPROBS, TEXTS
from nearfar.edge_runtime.openai.responses.kept import is_reference
from nearfar.fallback_server.http.apis.asking import Record, kept_of, known_of, skip
from nearfar.fallback_server.http.fields import (
    HINT,
    MAX_PARTS,
    PASSED,
    SILENT,
    JsonObject,
    Name,
    Only,
    Strict,
    by,
    few,
    many,
    within,
)
from nearfar.fallback_server.http.ignoring import computes
from nearfar.fallback_server.http.places import differing, fault_at
from nearfar.fallback_server.http.schemas import (
    MAX_MESSAGES,
    NO_MEDIA,
    Echoed,
    FunctionSpec,
    ModelName,
    SamplingFields,
    SilentFields,
    TemplateVariables,
)
from nearfar.fallback_server.http.words import shown
from nearfar.format.requests import MAX_TOOLS
from nearfar.format.sizes import TOP_LOGPROBS


class InputPart(Strict):
    """A part of an item's content: text, or images and files for upstreams that read them."""

    place = "input.content."
    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[Echoed | None, SILENT] = None
    logprobs: Annotated[Echoed | None, SILENT] = None
    image_url: Annotated[Any, PASSED] = None
    detail: Annotated[Any, PASSED] = None
    file_id: Annotated[Any, PASSED] = None
    file_url: Annotated[Any, PASSED] = None
    file_data: Annotated[Any, PASSED] = None
    filename: Annotated[Any, PASSED] = None
    input_audio: Annotated[Any, PASSED] = None

    @model_validator(mode="after")
    def _text_only(self) -> InputPart:
        if self.type in TEXTS or self.type == "refusal":
            name = "refusal" if self.type == "refusal" else "text"
            if getattr(self, name) is None:
                raise ValueError(f"a part of type '{self.type}' needs the field '{name}'")
        elif computes.get():
            raise ValueError(f"only parts of type 'input_text' are taken, not {shown(self.type)}; {NO_MEDIA}")
        return self


Parts = Annotated[list[InputPart], many(MAX_PARTS), few(MAX_PARTS)]


class MessageItem(Strict):
    """A message of the conversation."""

    place = "input."
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: Annotated[str | None, SILENT] = None
    status: Annotated[str | None, SILENT] = None

    @model_validator(mode="after")
    def _parts_of_its_role(self) -> MessageItem:
        parts = () if isinstance(self.content, str) or self.role == "assistant" else self.content
        if any(part.type == "refusal" for part in parts):
            raise ValueError(f"a message of the role '{self.role}' has no parts of type 'refusal'")
        if self.content == [] and self.role == "user":
            raise fault_at(("content",), "this must not be empty", self.content)
        return self


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
    """A reference by its id to an item of a stored response."""

    place = "input."
    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=128)]


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    by("type", missing="message"),
]


def typed(given: Any) -> Any:
    """Return items with the type of references that lack it."""
    if not isinstance(given, list):
        return given
    return [
        {**item, "type": "item_reference"} if isinstance(item, dict) and is_reference(item) else item
        for item in given
    ]


class FunctionTool(FunctionSpec):
    """A function that may be called, with a chat completion's fields beside its type."""

    place = "tools."
    type: Literal["function"]


class NamespaceTool(Strict):
    """Functions that belong together."""

    place = "tools."
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[FunctionTool], many(MAX_TOOLS), few(MAX_TOOLS)]

    @field_validator("tools", mode="wrap")
    @classmethod
    def _functions(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(given, "tools.tools", ("function",), handler)


ToolItem = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class ResponseToolName(Strict):
    """A function that must be, or may be, called."""

    place = "tool_choice."
    type: Literal["function"]
    name: Name
    namespace: Name | None = None


class AllowedTool(ResponseToolName):
    """A function that may be called."""

    place = "tool_choice.tools."


class AllowedTools(Strict):
    """The functions of which the model may call any; with mode "required" it must call one."""

    place = "tool_choice."
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], many(MAX_TOOLS, 1), few(MAX_TOOLS)]

    @field_validator("tools", mode="wrap")
    @classmethod
    def _functions(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        known = ("function",)
        if isinstance(given, list) and given and not kept_of(given, known):
            raise ValueError("none of these tools is a function, and no others run here: allow a function")
        return known_of(given, "tool_choice.tools", known, handler)


ToolChoiceItem = Annotated[ResponseToolName | AllowedTools, Field(discriminator="type")]


class TextFormat(Strict):
    """The format of the answer: text, any JSON object, or a JSON schema."""

    place = "text.format."
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Name | None, SILENT] = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: Annotated[str | None, SILENT] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' needs the field 'schema'")
        return self


class ResponseText(Strict):
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


class ResponseStreamOptions(Strict):
    """Options of a stream. The obfuscation that clients may turn off is never added here."""

    place = "stream_options."
    include_obfuscation: Annotated[bool | None, SILENT] = None


class ResponseRequest(SamplingFields, SilentFields):
    """/v1/responses."""

    model: ModelName = None
    input: str | Annotated[list[Item], many(MAX_MESSAGES), few(MAX_MESSAGES)] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    repetition_penalty: float | None = within("repetition_penalty")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[ToolItem], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceItem | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
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
    max_tool_calls: Annotated[int | None, Field(ge=1), SILENT] = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _readable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        made = known_of(typed(given), "input", ITEMS, handler)
        differing(given, "an earlier item has this id: give each item its own", "id")
        return made

    @field_validator("tools", mode="wrap")
    @classmethod
    def _runnable(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return known_of(given, "tools", ("function", "namespace"), handler)

    @field_validator("include")
    @classmethod
    def _included(cls, given: list[str] | None) -> list[str] | None:
        for at, name in enumerate(given or ()):
            if name == LOGPROBS:
                continue
            try:
                skip(f"include.{name}", f"{shown(name)} is not known here; leave it out")
            except ValueError as error:
                raise fault_at((at,), str(error), name) from error
        return given

    @property
    def given(self) -> Record:
        """The request as JSON, without fields that are not given."""
        return self.model_dump(exclude_none=True, by_alias=True)


def items_of(given: str | list[Any] | None) -> str | list[Record] | None:
    """Return checked items as JSON, without fields that are not given."""
    if given is None or isinstance(given, str):
        return given
    return [item.model_dump(exclude_none=True) for item in given]


def parts_of(given: str | list[Any]) -> list[InputPart]:
    """Return the parts of all items."""
    contents = [] if isinstance(given, str) else [_contents(item) for item in given]
    return [part for content in contents for part in content]


def _contents(item: Any) -> Sequence[InputPart]:
    held = getattr(item, "content", None) or getattr(item, "output", None) or ()
    return () if isinstance(held, str) else held
