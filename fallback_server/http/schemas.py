"""Requests as clients send them: strict, bounded, in OpenAI's names. What is not named here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from nearfar.fallback_server.tenants import MAX_PRIORITY

MAX_MESSAGES = 2048
MAX_CHOICES = 32
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_PROMPTS = 64
MAX_INPUTS = 256
MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
"""Bytes of a schema, a regular expression or a grammar; of all tools together."""

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
JsonObject = dict[str, Any]


class Strict(BaseModel):
    """No unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(Strict):
    """A part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None

    @model_validator(mode="after")
    def _text_only(self) -> TextPart:
        if self.type != "text" or self.text is None:
            raise ValueError(f"only parts of type 'text' are taken, not {self.type!r:.40}; this server fetches no URLs")
        return self


Content = str | list[TextPart]


class Function(Strict):
    """A function that a model called."""

    name: Name
    arguments: str


class Call(Strict):
    """A call of an earlier answer."""

    id: str = Field(max_length=128)
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer, or the beginning of this one."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = Field(None, max_length=MAX_TOOLS)
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("an assistant message needs content or tool_calls")
        return self


class ToolMessage(Strict):
    """What a call gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=128)
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionSpec(Strict):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    """The function that must be called."""

    name: Name


class NamedTool(Strict):
    """A tool_choice that names a function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """The schema of an answer."""

    name: Name
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must be. `regex` and `grammar` (EBNF) are ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, min_length=1, max_length=MAX_SCHEMA_BYTES)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_SCHEMA_BYTES)

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type in ("json_schema", "regex", "grammar") and getattr(self, self.type) is None:
            raise ValueError(f"type {self.type!r} needs the field {self.type!r}")
        return self


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(Strict):
    """What both kinds of completion take; null stands for the default."""

    model: str = Field(min_length=1, max_length=256)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | list[Stop] | None = Field(None)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    user: str | None = Field(None, max_length=512)

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stop)}")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or {}:
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"{token!r:.40} is not a token id")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class ChatRequest(Common):
    """/v1/chat/completions. The last fields are taken and not used."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[Name, bool | int | float | str] | None = Field(None, max_length=16)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice is not None and self.tool_choice not in ("none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the role assistant")
        return self


class CompletionRequest(Common):
    """/v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(16, ge=0, le=2**31 - 1)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must equal n: answers are not ranked")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 needs echo: true")
        if isinstance(self.prompt, list):
            if not self.prompt:
                raise ValueError("prompt is an empty list")
            if not isinstance(self.prompt[0], int) and len(self.prompt) > MAX_PROMPTS:
                raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(self.prompt)}")
        return self


class EmbeddingRequest(Strict):
    """/v1/embeddings. `pooling` is ours."""

    model: str = Field(min_length=1, max_length=256)
    input: str | list[TokenId] | list[str] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65536)
    pooling: Literal["mean", "last"] = "mean"
    user: str | None = Field(None, max_length=512)

    @field_validator("input")
    @classmethod
    def _some(cls, value: str | list[Any]) -> str | list[Any]:
        if isinstance(value, list):
            if not value:
                raise ValueError("input is an empty list")
            if not isinstance(value[0], int) and len(value) > MAX_INPUTS:
                raise ValueError(f"at most {MAX_INPUTS} inputs, not {len(value)}")
        return value
