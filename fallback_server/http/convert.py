"""Converts requests as clients send them to engine requests."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from codecs import BOM_UTF8
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.parameters import SAMPLING
from nearfar.edge_runtime.tools.asking import ToolChoice
from nearfar.edge_runtime.tools.messages import canonical
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest, Prompt
from nearfar.fallback_server.engines.hints import Hint
from nearfar.fallback_server.http.errors import JSON, ApiError, no_object
from nearfar.fallback_server.http.fields import Only
from nearfar.fallback_server.http.forms import ResponseFormat
from nearfar.fallback_server.http.json_text import parsed
from nearfar.fallback_server.http.json_words import read_json
from nearfar.fallback_server.http.schemas import (
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    EmbeddingRequest,
    NamedTool,
    Thinking,
)
from nearfar.fallback_server.http.words import shown
from nearfar.format.requests import MAX_GRAMMAR_BYTES, MAX_TOOLS_BYTES
from nearfar.json_size import json_bytes

LARGE = 64 << 10
"""Bytes of a body from which on it is parsed in a thread, so that other requests do not wait."""


_JSON = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE | re.ASCII)
"""The media types that FastAPI reads as JSON."""


class JsonRequest(Request):
    """A request whose body is read as strict JSON: no NaN, no lone surrogates, no deep nesting. `model`: the
    model that validates it.
    """

    max_depth = 64
    model: type[BaseModel] | None = None
    read: Any = None
    """The parsed body as received; None before `json` was called."""

    async def read_json(self) -> Any:
        """Return the body, not validated. Raises ApiError with 400 for invalid JSON."""
        model, self.model = self.model, None
        try:
            return await self.json()
        finally:
            self.model = model

    async def json(self) -> Any:
        """Return the body. Raises ApiError with 400 for invalid JSON, and for a body of another type: a page
        of any site can send such a body without asking first.

        A large body is also validated in the thread, and FastAPI takes the instance as it is. If that fails,
        FastAPI validates the data again and reports the errors.
        """
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                415,
                f"the body is compressed (Content-Encoding: {ascii(coding[:40])[1:-1]}), which this server "
                "cannot read: send it as it is",
                None,
                "unsupported_encoding",
            )
        kind = self.headers.get("content-type")
        if not _JSON.match(kind or ""):
            raise no_object("is not JSON", kind)
        body = (await self.body()).removeprefix(BOM_UTF8)
        if len(body) < LARGE:
            self.read = made = parsed(body, self.max_depth)
        else:
            self.read, made = await asyncio.to_thread(_validated, body, self.max_depth, self.model)
        self.state.sent = self.read
        if self.model is not None and not isinstance(self.read, dict):
            raise no_object(f"is {shown(self.read)}, not a JSON object", JSON)
        return made


def _validated(body: bytes, depth: int, model: type[BaseModel] | None) -> tuple[Any, Any]:
    """Return the parsed body, and the body as an instance of `model`, or the data again where it is
    invalid.
    """
    data = parsed(body, depth)
    try:
        return data, data if model is None else model.model_validate(data)
    except ValueError:
        return data, data


def chat(body: ChatRequest) -> EngineRequest:
    """Convert a chat completion."""
    dumped = _dumped(body)
    tools = tuple({"type": "function", "function": tool["function"]} for tool in dumped.get("tools", ()))
    _small(tools, "tools", MAX_TOOLS_BYTES)
    return EngineRequest(
        messages=tuple(canonical(message) for message in dumped["messages"]),
        tools=tools,
        tool_choice=_tool_choice(body),
        max_tokens=body.longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        template=body.chat_template_kwargs or {},
        hints=_hints(body),
        continue_last=bool(body.continue_final_message),
        begin_answer=body.add_generation_prompt is not False,
        split_reasoning=body.include_reasoning is not False,
        **_common(body, f"chatcmpl-{secrets.token_hex(12)}", dumped),
    )


def _hints(body: ChatRequest) -> tuple[Hint, ...]:
    """Collect the hints on thinking and verbosity, under the field names of all APIs."""
    found: list[Hint] = []
    if body.reasoning_effort is not None:
        found.append(Hint("reasoning_effort", "reasoning_effort", body.reasoning_effort))
    if body.verbosity is not None:
        found.append(Hint("verbosity", "verbosity", body.verbosity))
    for name in ("enable_thinking", "thinking", "think"):
        value = getattr(body, name)
        if isinstance(value, str):
            found.append(Hint(name, "reasoning_effort", value))
        elif value is not None:
            found.append(Hint(name, "thinking", value.on if isinstance(value, Thinking) else value))
    return tuple(found)


def completion(body: CompletionRequest) -> EngineRequest:
    """Convert a plain completion of one or several prompts."""
    return EngineRequest(
        prompts=prompts(body.prompt),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        # The prompt may be a million token ids: it is passed on without a copy.
        **_common(body, f"cmpl-{secrets.token_hex(12)}", {**_dumped(body, "prompt"), "prompt": body.prompt}),
    )


def prompts(given: str | list[int] | list[str] | list[list[int]]) -> tuple[Prompt, ...]:
    """Convert the prompts, text or tokens, to a tuple."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(tuple(item) if isinstance(item, list) else str(item) for item in given)


def _dumped(body: CompletionFields, *without: str) -> dict[str, Any]:
    """Return the body for an upstream server, without fields that have no effect, which it may not know."""
    return body.model_dump(exclude_none=True, by_alias=True, exclude={*body.idle(), *without})


def as_it_came(given: dict[str, Any], body: CompletionFields | EmbeddingRequest) -> dict[str, Any]:
    """Return the body for an upstream that may know more fields: as the client sent it, with unknown fields
    and parts of messages, but without fields that have no effect.
    """
    made = {name: value for name, value in given.items() if value is not None}
    for name, field in type(body).model_fields.items():
        only = next((one for one in field.metadata if isinstance(one, Only)), None)
        if only is not None and name in made and only.idle(made[name]):
            del made[name]
    # The request model has checked `messages` where that is a field of it; elsewhere they are anything.
    if "messages" in type(body).model_fields and isinstance(messages := made.get("messages"), list):
        made["messages"] = [
            {name: value for name, value in message.items() if value is not None} for message in messages
        ]
    return made


def _common(body: CompletionFields, name: str, dumped: dict[str, Any]) -> dict[str, Any]:
    stop = body.stop
    return {
        "id": name,
        "model": body.model or "",
        "n": body.n or 1,
        "min_tokens": body.min_tokens or 0,
        "sampling": _sampling(body),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "prompt_logprobs": body.prompt_logprobs,
        "grammar": _grammar(body),
        "priority": body.priority or 0,
        "body": dumped,
    }


def _sampling(body: CompletionFields) -> dict[str, Any]:
    """Return the fields of Sampling that the caller gave."""
    given: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)  # vLLM's clients send -1 to turn it off
    if body.logit_bias:
        given["logit_bias"] = {int(token): float(value) for token, value in body.logit_bias.items()}
    if "seed" in given:
        given["seed"] &= 2**64 - 1
    return given


def _grammar(body: CompletionFields) -> Grammar | None:
    """Return the grammar that the answer must match. OpenAI has it in response_format, vLLM in
    structured_outputs or guided_*.
    """
    if body.response_format is not None and body.response_format.type != "text":
        return _form(body.response_format)
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_object:
            return Grammar("json_object", "")
        return _guided("structured_outputs", outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
    return _guided(
        "guided_json", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _form(form: ResponseFormat) -> Grammar | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", "")
        case "json_schema":
            schema = (form.json_schema and form.json_schema.schema_) or {"type": "object"}
            return Grammar("json_schema", _small(schema, "response_format"))
        case "regex":
            return Grammar("regex", form.regex or "")
        case "grammar":
            return Grammar("ebnf", form.grammar or "")


def _guided(
    param: str, schema: Any, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Grammar | None:
    if isinstance(schema, str):
        try:
            schema = read_json(schema.encode())
        except ValueError as error:
            place = param if param.endswith("json") else f"{param}.json"
            raise RequestError(f"{place}: the schema is not valid JSON: {error}", param) from error
    if schema is not None:
        return Grammar("json_schema", _small(schema, param))
    if choice is not None:
        either = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in choice]}
        return Grammar("structural_tag", _small({"type": "structural_tag", "format": either}, param))
    if regex is not None:
        return Grammar("regex", regex)
    return Grammar("ebnf", grammar) if grammar is not None else None


def _small(value: Any, param: str, most: int = MAX_GRAMMAR_BYTES) -> str:
    """Return the value as JSON. Raises RequestError if that has more than `most` bytes."""
    if (size := json_bytes(value)) > most:
        raise RequestError(f"{param} takes at most {most:,} bytes of JSON, not {size:,}", param)
    return json.dumps(value)


def _tool_choice(body: ChatRequest) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedTool):
        return ToolChoice("required", body.tool_choice.function.name, parallel)
    return ToolChoice(body.tool_choice or "auto", None, parallel)
