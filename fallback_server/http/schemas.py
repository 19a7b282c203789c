"""Requests in OpenAI's names: strict and bounded. Fields that are not defined here are rejected."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal, LiteralString, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from nearfar.edge_runtime.tools.messages import TEXTS, texts_of
from nearfar.fallback_server.http.fields import (
    HINT,
    MAX_PARTS,
    OPEN,
    PASSED,
    SILENT,
    AnyJson,
    Bias,
    Inputs,
    Name,
    Only,
    Parameters,
    Prompts,
    Stops,
    Strict,
    Text,
    TokenId,
    few,
    many,
    one_of,
    within,
)
from nearfar.fallback_server.http.forms import MAX_OPTIONS, ResponseFormat, StructuredOutputs
from nearfar.fallback_server.http.ignoring import computes, passes_on
from nearfar.fallback_server.http.words import shown
from nearfar.fallback_server.tenants import MAX_PRIORITY
from nearfar.format.requests import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_LISTED,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_VARIABLES,
)
from nearfar.format.sizes import TOP_LOGPROBS

MAX_MESSAGES = 2048
FORM = "use response_format"
NO_MEDIA = "this server reads no images, sounds and files"


class CacheControl(Strict):
    """Marks where a cached prefix may end, for servers that need it; here prefixes are found without it."""

    place = "cache_control."
    type: str = Field(max_length=32)
    ttl: str | None = Field(None, max_length=32)


class ContentPart(Strict):
    """A part of a message's content: text, or images and sounds for upstreams that read them."""

    place = "messages.content."
    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[Any, PASSED] = None
    video_url: Annotated[Any, PASSED] = None
    audio_url: Annotated[Any, PASSED] = None
    input_audio: Annotated[Any, PASSED] = None
    file: Annotated[Any, PASSED] = None
    cache_control: Annotated[CacheControl | None, SILENT] = None

    @model_validator(mode="after")
    def _text_only(self) -> ContentPart:
        if self.type in TEXTS:
            if getattr(self, self.type) is None:
                raise ValueError(f"a part of type '{self.type}' needs the field '{self.type}'")
        elif computes.get():
            raise ValueError(f"only parts of type 'text' are taken, not {shown(self.type)}; {NO_MEDIA}")
        return self


Content = Annotated[
    Text | Annotated[list[ContentPart], many(MAX_PARTS), few(MAX_PARTS), Tag("list[part]")],
    one_of({dict: "list[part]", ContentPart: "list[part]"}, "this must be a string or a list of parts"),
]


class MessageFunction(Strict):
    """A function that a model called."""

    place = "messages.tool_calls.function."
    name: Name
    arguments: str


class MessageToolCall(Strict):
    """A call of an earlier answer."""

    place = "messages.tool_calls."
    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: MessageFunction
    index: Annotated[int | None, SILENT] = None


class Said(Strict):
    """The fields that all messages have."""

    place = "messages."
    role: str
    content: Content | None
    name: str | None = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(instead="use tool_calls")] = None

    @model_validator(mode="after")
    def _parts_of_its_role(self) -> Self:
        parts = self.content if isinstance(self.content, list) and computes.get() else ()
        if wrong := next((part.type for part in parts if part.type not in texts_of(self.role)), None):
            raise ValueError(
                f"a message of the role {shown(self.role)} has parts of type 'text' alone, not '{wrong}'"
            )
        return self


class SystemMessage(Said):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Said):
    """A turn of the user, as text or parts."""

    role: Literal["user"]
    content: Content

    @field_validator("content")
    @classmethod
    def _not_empty(cls, content: str | list[ContentPart]) -> str | list[ContentPart]:
        if content == []:
            raise ValueError("this must not be empty")
        return content


Echoed = Annotated[list[AnyJson], many(MAX_PARTS), few(MAX_PARTS)]
"""A list that an earlier answer had; clients send it back."""


class AssistantMessage(Said):
    """An earlier answer, or the beginning of this one."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    tool_calls: Annotated[Annotated[list[MessageToolCall], many(MAX_TOOLS), few(MAX_TOOLS)] | None, OPEN] = (
        None
    )
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[Echoed | None, SILENT] = None


class ToolMessage(Said):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=128)


class OtherMessage(Said):
    """A message of a role that some chat templates know (ipython, document)."""

    role: str = Field(min_length=1, max_length=64)
    content: Content


_TAGS = {"developer": "system", **dict.fromkeys(("system", "user", "assistant", "tool"))}


def role(message: Any) -> str | None:
    """Select the message type by role. A value that is not an object selects the first one, whose validation
    reports it.
    """
    if not isinstance(message, dict | Strict):
        return "system"
    given = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    if not isinstance(given, str) or given not in _TAGS:
        return None if given is None else "other"
    return _TAGS[given] or given


Message = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[OtherMessage, Tag("other")],
    Discriminator(role),
]


class FunctionSpec(Strict):
    """A function that may be called; `parameters` is a JSON schema."""

    place = "tools.function."
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    place = "tools."
    type: Literal["function"]
    function: FunctionSpec
    cache_control: Annotated[CacheControl | None, SILENT] = None


class NamedFunction(Strict):
    """The function that must be called."""

    place = "tool_choice.function."
    name: Name


class NamedTool(Strict):
    """A tool_choice that names a function."""

    place = "tool_choice."
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    """Options of a stream. `continuous_usage_stats`: each chunk has the usage so far."""

    place = "stream_options."
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, SILENT] = None


def concerning(param: str, message: LiteralString, **values: Any) -> PydanticCustomError:
    """An error about several fields together, with the one to name, and `values` for the message."""
    return PydanticCustomError("value_error", message, {"param": param, **values})


def check_least(least: int | None, most: int | None) -> None:
    """Raise an error if an answer must have more tokens than it may have."""
    if least is not None and most is not None and least > most:
        message = "min_tokens is {least}, and an answer may have {most} tokens at most: lower min_tokens"
        raise concerning("min_tokens", message, least=least, most=most)


ModelName = Annotated[str | None, Field(min_length=1, max_length=256)]
"""The requested model; null where the server has only one."""


class SamplingFields(Strict):
    """The sampling parameters that have one name and one range in OpenAI's APIs and in Ollama's."""

    temperature: float | None = within("temperature")
    top_p: float | None = within("top_p")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = within("min_p")
    presence_penalty: float | None = within("presence_penalty")
    frequency_penalty: float | None = within("frequency_penalty")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops | None = None


class SilentFields(Strict):
    """OpenAI's fields that say nothing of the answer: any value of their type is accepted."""

    metadata: Annotated[Annotated[dict[str, str], Field(max_length=16), few(16)] | None, SILENT] = None
    service_tier: Annotated[str | None, Field(max_length=32), SILENT] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=512), SILENT] = None
    prompt_cache_retention: Annotated[str | None, Field(max_length=32), SILENT] = None
    safety_identifier: Annotated[str | None, Field(max_length=512), SILENT] = None


class CompletionFields(SamplingFields):
    """Fields of both kinds of completion; null means the default."""

    model: ModelName = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    repetition_penalty: float | None = within("repetition_penalty")
    logit_bias: Bias | None = None
    stop_token_ids: Annotated[list[TokenId], many(MAX_STOPS), few(MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None, OPEN] = None
    user: Annotated[str | None, Field(max_length=512), SILENT] = None
    response_format: Annotated[ResponseFormat | None, OPEN] = None
    structured_outputs: Annotated[StructuredOutputs | None, OPEN] = None
    guided_json: AnyJson = None
    guided_regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    guided_choice: Annotated[list[str], many(MAX_OPTIONS, 1), few(MAX_OPTIONS)] | None = None
    guided_grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_BYTES)
    guided_decoding_backend: Annotated[Any, Only(), SILENT] = None
    guided_whitespace_pattern: Annotated[Any, Only()] = None
    use_beam_search: Annotated[Any, Only((False,))] = None
    length_penalty: Annotated[Any, Only((1, 1.0))] = None
    skip_special_tokens: Annotated[Any, Only((True,))] = None
    spaces_between_special_tokens: Annotated[Any, Only((True,))] = None
    include_stop_str_in_output: Annotated[Any, Only((False,))] = None
    detokenize: Annotated[Any, Only((True,))] = None
    bad_words: Annotated[Any, Only(([],))] = None
    allowed_token_ids: Annotated[Any, Only()] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    logprob_token_ids: Annotated[Any, Only()] = None
    # The names of llama.cpp and SGLang for the form of an answer.
    json_schema: Annotated[Any, Only(instead=FORM)] = None
    grammar: Annotated[Any, Only(("",), instead=FORM)] = None
    regex: Annotated[Any, Only(instead=FORM)] = None
    ebnf: Annotated[Any, Only(instead=FORM)] = None
    logits_processors: Annotated[Any, Only(([],))] = None

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [key for key in bias or {} if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if wrong:
            named = ", ".join(f"{key!r:.40}" for key in wrong[:3])
            raise ValueError(f"{named} {'is not a token id' if len(wrong) == 1 else 'are not token ids'}")
        return bias

    @classmethod
    def idle(cls) -> set[str]:
        """Return the fields that are accepted only with values that have no effect."""
        return {
            name
            for name, field in cls.model_fields.items()
            if any(isinstance(one, Only) for one in field.metadata)
        }

    @model_validator(mode="after")
    def _one_form(self) -> CompletionFields:
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        form = (
            None
            if self.response_format is None or self.response_format.type == "text"
            else self.response_format
        )
        if sum(one is not None for one in (form, self.structured_outputs, *guided)) > 1:
            raise ValueError(
                "an answer has one form: give one of response_format, structured_outputs and guided_*"
            )
        if self.guided_json is not None and not isinstance(self.guided_json, str | dict):
            raise ValueError("guided_json must be a JSON schema, as an object or as text")
        return self

    @model_validator(mode="after")
    def _fits_a_stream(self) -> CompletionFields:
        if self.stream_options is not None and not self.stream:
            raise concerning("stream_options", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream and not passes_on.get():
            raise concerning("prompt_logprobs", "prompt_logprobs needs an answer that is not streamed")
        return self


class Thinking(Strict):
    """Whether a model thinks before it answers, in the fields of Anthropic's and DeepSeek's clients."""

    place = "thinking."
    type: Annotated[Literal["enabled", "adaptive", "disabled"], HINT]
    budget_tokens: Annotated[int | None, Field(ge=1), SILENT] = None

    @property
    def on(self) -> bool:
        """Whether thinking is requested."""
        return self.type != "disabled"


def check_turns(messages: Seq[Said], continues: bool | None, begins: bool | None) -> None:
    """Raise an error if an answer cannot continue the last message, or would also begin a new one."""
    if continues and messages[-1].role != "assistant":
        raise concerning("messages", "continue_final_message needs a last message of the role assistant")
    if continues and begins:
        raise concerning(
            "add_generation_prompt",
            "continue_final_message goes on with the last message, and add_generation_prompt begins another: "
            "give one of them",
        )


Scalar = bool | int | float | str
TemplateValue = Scalar | Annotated[list[Scalar], many(MAX_LISTED), few(MAX_LISTED)]
TemplateVariables = Annotated[dict[Name, TemplateValue], Field(max_length=MAX_VARIABLES), few(MAX_VARIABLES)]
"""Variables for a chat template by their names."""


class ChatRequest(CompletionFields, SilentFields):
    """/v1/chat/completions. The last fields have no effect on the answer: they are accepted and not used."""

    messages: Annotated[list[Message], many(MAX_MESSAGES, 1), few(MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    tools: Annotated[Annotated[list[Tool], many(MAX_TOOLS), few(MAX_TOOLS)] | None, OPEN] = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, OPEN] = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[TemplateVariables | None, OPEN] = None
    reasoning_effort: Annotated[str | None, Field(max_length=32), HINT] = None
    verbosity: Annotated[str | None, Field(max_length=32), HINT] = None
    enable_thinking: Annotated[bool | None, HINT] = None
    think: Annotated[bool | Annotated[str, Field(max_length=32)] | None, HINT] = None
    thinking: Annotated[bool | Thinking | None, HINT] = None
    best_of: Annotated[Any, Only((1,))] = None
    add_special_tokens: Annotated[Any, Only((False,))] = None
    chat_template: Annotated[Any, Only()] = None
    documents: Annotated[Any, Only(([],), instead="put their text into a message")] = None
    echo: Annotated[Any, Only((False,))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    audio: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only(), SILENT] = None
    web_search_options: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only(instead="use tools")] = None
    function_call: Annotated[Any, Only(instead="use tool_choice")] = None
    store: Annotated[bool | None, SILENT] = None

    @property
    def longest(self) -> int | None:
        """The most tokens of an answer; None where only the context limits them."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @field_validator("tools")
    @classmethod
    def _names_apart(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"there are two of the name {twice!r}: give each its own")
        return tools

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise concerning("top_logprobs", "top_logprobs needs logprobs: true")
        if (
            self.tool_choice is not None
            and self.tool_choice not in ("none", "auto")
            and not (self.tools or passes_on.get())
        ):
            raise concerning("tool_choice", "tool_choice needs tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.longest:
            raise concerning(
                "max_tokens",
                "max_tokens is {old}, and max_completion_tokens, its newer name, is {new}: give one of them",
                old=self.max_tokens,
                new=self.longest,
            )
        check_least(self.min_tokens, self.longest)
        check_turns(self.messages, self.continue_final_message, self.add_generation_prompt)
        return self


class CompletionRequest(CompletionFields):
    """/v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: Annotated[Any, Only(("",))] = None
    add_special_tokens: Annotated[Any, Only((True,))] = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise concerning("best_of", "best_of must equal n: answers are not ranked")
        if self.max_tokens == 0 and not self.echo:
            raise concerning("max_tokens", "max_tokens 0 needs echo: true")
        check_least(self.min_tokens, self.max_tokens)
        return self


class EmbeddingRequest(Strict):
    """/v1/embeddings. `pooling` is an extension of nearfar; "model" means the model's own pooling."""

    model: ModelName = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65536)
    pooling: Literal["mean", "last", "model"] = "model"
    user: Annotated[str | None, Field(max_length=512), SILENT] = None
