"""Checks of a request of the Responses API on a device: what an engine cannot follow is rejected by name.

The checks here cover the form of items, tools and options. The values of messages, tools and sampling
parameters are checked where the chat completion is.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.openai.parameters import TurnParams
from nearfar.edge_runtime.openai.responses.asking import ITEMS
from nearfar.edge_runtime.openai.responses.kept import is_reference
from nearfar.errors import RequestError
from nearfar.suggestions import advised


class ResponseParams(TurnParams, total=False):
    """Parameters of a response. None means the default.

    `include`, `metadata`, `service_tier`, `prompt_cache_key`, `prompt_cache_retention`, `safety_identifier`,
    `user` and `max_tool_calls` change nothing but `include` with message.output_text.logprobs.
    """

    instructions: str | None
    previous_response_id: str | None
    store: bool | None
    max_output_tokens: int | None
    text: Mapping[str, Any] | None
    reasoning: Mapping[str, Any] | None
    include: Seq[str] | None
    truncation: str | None
    background: bool | None
    metadata: Mapping[str, str] | None
    service_tier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    safety_identifier: str | None
    max_tool_calls: int | None


NAMES = frozenset({"input", "stream", *ResponseParams.__annotations__})
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
"""Fields that an item of a type must have: texts; `content` and `output` may be lists of parts."""
_PARTS = ("content", "output", "summary")


def checked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters, without None. Raises RequestError for a wrong form."""
    if unknown := sorted(set(params) - NAMES):
        raise RequestError(f"unknown parameter {', '.join(unknown)}{advised(unknown, NAMES)}", unknown[0])
    body = {name: value for name, value in params.items() if value is not None}
    for name, idle in (("background", False), ("truncation", "disabled")):
        if body.get(name, idle) != idle:
            raise RequestError(f"{name} may only be {idle!r} here, not {body[name]!r:.80}", name)
    for name in ("instructions", "previous_response_id"):
        _check(isinstance(body.get(name, ""), str), name, "a string", body.get(name))
    most = body.get("max_output_tokens", 1)
    fits = type(most) is int and most >= 1
    _check(fits, "max_output_tokens", "a whole number, at least 1", most)
    for name in ("text", "reasoning", "metadata"):
        _check(isinstance(body.get(name, {}), Mapping), name, "an object", body.get(name))
    _check(isinstance(body.get("store", False), bool), "store", "true or false", body.get("store"))
    for name in ("text", "reasoning"):
        if name in body:
            body[name] = {key: value for key, value in body[name].items() if value is not None}
    _check_options(body)
    if "input" in body and not isinstance(body["input"], str):
        _check(_is_list(body["input"]), "input", "a text or a list of items", body["input"])
        body["input"] = [_item(f"input[{at}]", item) for at, item in enumerate(body["input"])]
    if "tools" in body:
        _check(_is_list(body["tools"]), "tools", "a list of functions and namespaces", body["tools"])
        body["tools"] = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(body["tools"])]
    _check_choice(body.get("tool_choice", "auto"))
    return body


def _check_options(body: Mapping[str, Any]) -> None:
    form = body.get("text", {}).get("format", {"type": "text"})
    kinds = ("text", "json_object", "json_schema")
    fits = isinstance(form, Mapping) and form.get("type") in kinds
    _check(fits, "text", f"format: {{'type': one of {', '.join(kinds)}}}", body.get("text"))
    for name, key in (("reasoning", "effort"), ("text", "verbosity")):
        value = body.get(name, {}).get(key, "")
        _check(isinstance(value, str), name, f"an object whose {key} is a word", value)
    known = {"text": {"format", "verbosity"}, "reasoning": {"effort", "summary", "generate_summary"}}
    for name, keys in known.items():
        if unknown := sorted(set(body.get(name, ())) - keys):
            raise RequestError(f"{name}.{unknown[0]} is not a known field{advised(unknown, keys)}", name)
    include = body.get("include", [])
    fits = _is_list(include) and all(isinstance(each, str) for each in include)
    _check(fits, "include", "a list of names", include)


def _item(where: str, item: object) -> dict[str, Any]:
    _check(isinstance(item, Mapping), "input", "an item with a type", item, where)
    assert isinstance(item, Mapping)
    made = {str(name): value for name, value in item.items() if value is not None}
    kind = made.setdefault("type", "item_reference" if is_reference(made) else "message")
    _check(kind in ITEMS, "input", f"an item of a type of {', '.join(ITEMS)}", kind, where)
    for name in _NEEDED.get(kind, ()):
        _check(name in made, "input", f"an item with {name}", made, where)
    for name in ("role", "call_id", "name", "arguments", "namespace", "id"):
        _check(isinstance(made.get(name, ""), str), "input", "text", made.get(name), f"{where}.{name}")
    for name in _PARTS:
        if name in made and not isinstance(made[name], str):
            fits = _is_list(made[name]) and all(_is_part(part) for part in made[name])
            _check(fits, "input", "text or parts with a type", made[name], f"{where}.{name}")
    if kind == "reasoning":
        for name in ("content", "summary"):
            _check(not isinstance(made.get(name), str), "input", "parts", made.get(name), f"{where}.{name}")
    return made


def _tool(where: str, tool: object) -> dict[str, Any]:
    fits = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    _check(fits and kind in ("function", "namespace"), "tools", "a function or a namespace", tool, where)
    assert isinstance(tool, Mapping)
    known = {"type", "name", "description", *(("parameters", "strict") if kind == "function" else ("tools",))}
    made = {name: value for name, value in tool.items() if value is not None}
    if unknown := sorted(set(made) - known):
        raise RequestError(
            f"{where}.{unknown[0]} is not a field of a {kind}{advised(unknown, known)}", "tools"
        )
    if kind == "namespace":
        inner = made.get("tools")
        _check(_is_list(inner), "tools", "a list of functions", inner, f"{where}.tools")
        made["tools"] = [_tool(f"{where}.tools[{at}]", each) for at, each in enumerate(made["tools"])]
        flat = all(each["type"] == "function" for each in made["tools"])
        _check(flat, "tools", "a list of functions", inner, f"{where}.tools")
    return made


def _check_choice(choice: object) -> None:
    if isinstance(choice, str):
        return  # the chat completion checks the word
    given: Mapping[str, Any] = choice if isinstance(choice, Mapping) else {}
    tools: Any = given.get("tools")
    fits = given.get("type") == "function" and isinstance(given.get("name"), str)
    if given.get("type") == "allowed_tools" and given.get("mode") in ("auto", "required"):
        fits = _is_list(tools) and all(
            isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in tools
        )
    _check(fits, "tool_choice", "a word, {'type': 'function', 'name'} or allowed_tools", choice)


def _is_part(part: object) -> bool:
    return (
        isinstance(part, Mapping)
        and isinstance(part.get("type"), str)
        and isinstance(part.get("text", ""), str)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Seq) and not isinstance(value, str | bytes)


def _check(fits: bool, param: str, what: str, value: object, where: str | None = None) -> None:
    if not fits:
        raise RequestError(f"{where or param} must be {what}, not {value!r:.80}", param)
