"""Checks `tools`, `tool_choice`, `parallel_tool_calls` and the calls in messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.tools.asking import ToolChoice
from nearfar.edge_runtime.tools.parameters import check_parameters
from nearfar.errors import RequestError
from nearfar.format.requests import MAX_TOOLS, MAX_TOOLS_BYTES
from nearfar.json_size import json_bytes
from nearfar.suggestions import advised

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""The allowed names of functions."""
_KINDS: Mapping[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (Mapping, "a JSON schema"),
    "strict": (bool, "true or false"),
}
_FUNCTION = frozenset({"name", *_KINDS})


def asked_tools(given: object) -> tuple[Mapping[str, Any], ...]:
    """Check the tools of a request; RequestError names the wrong part."""
    if given is None:
        return ()
    if not isinstance(given, Seq) or isinstance(given, str | bytes):
        raise RequestError(f"tools must be a list, not {given!r:.80}", "tools")
    if len(given) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} tools, not {len(given)}", "tools")
    made = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools has two of the name {twice!r}: give each its own", "tools")
    try:
        size = json_bytes(made)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"tools is not JSON: {error}", "tools") from error
    if size > MAX_TOOLS_BYTES:
        raise RequestError(f"tools takes at most {MAX_TOOLS_BYTES:,} bytes of JSON, not {size:,}", "tools")
    return made


def asked_choice(given: object, parallel: object) -> ToolChoice:
    """The ToolChoice of `tool_choice` and `parallel_tool_calls`; RequestError for other values."""
    if not isinstance(parallel, bool | None):
        raise RequestError(
            f"parallel_tool_calls must be true or false, not {parallel!r:.80}", "parallel_tool_calls"
        )
    several = parallel is not False
    match given:
        case None | "auto":
            return ToolChoice("auto", None, several)
        case "none":
            return ToolChoice("none", None, several)
        case "required":
            return ToolChoice("required", None, several)
    function = given.get("function") if isinstance(given, Mapping) else None
    if (
        not isinstance(given, Mapping)
        or set(given) != {"type", "function"}
        or given["type"] != "function"
        or not isinstance(function, Mapping)
        or set(function) != {"name"}
        or not _is_name(function["name"])
    ):
        raise RequestError(
            "tool_choice must be none, auto, required or {'type': 'function', 'function': {'name'}}, "
            f"not {given!r:.80}",
            "tool_choice",
        )
    return ToolChoice("required", function["name"], several)


def check_calls(where: str, message: Mapping[str, Any]) -> None:
    """Check the fields of a message that concern calls; RequestError names the wrong field."""
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if calls is not None:
        if message["role"] != "assistant":
            raise RequestError(f"{where}.tool_calls belongs to the role assistant", "messages")
        if not isinstance(calls, Seq) or isinstance(calls, str | bytes) or len(calls) > MAX_TOOLS:
            raise RequestError(f"{where}.tool_calls must be a list of at most {MAX_TOOLS} calls", "messages")
        for index, call in enumerate(calls):
            _check_call(f"{where}.tool_calls[{index}]", call)
    if message["role"] == "tool" and not isinstance(call_id, str):
        raise RequestError(f"{where}.tool_call_id must name the call, not {call_id!r:.80}", "messages")
    if not isinstance(call_id, str | None):
        raise RequestError(f"{where}.tool_call_id must be a string, not {call_id!r:.80}", "messages")


def _check_call(where: str, call: object) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(call, Mapping)
        or not isinstance(call.get("id"), str)
        or call.get("type", "function") != "function"
        or not isinstance(function, Mapping)
        or not _is_name(function.get("name"))
        or not isinstance(function.get("arguments"), str)
    ):
        raise RequestError(
            f"{where} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}} with the "
            f"arguments as JSON text, not {call!r:.80}",
            "messages",
        )


def _tool(where: str, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(
            f"{where} must be {{'type': 'function', 'function': …}}, not {tool!r:.80}", "tools"
        )
    unknown = sorted(str(name) for name in (set(tool) - {"type", "function"}) | (set(function) - _FUNCTION))
    if unknown:
        raise RequestError(f"{where} has no field {', '.join(unknown)}{advised(unknown, _FUNCTION)}", "tools")
    if not _is_name(function.get("name")):
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters, digits and _ . -, not "
            f"{function.get('name')!r:.80}",
            "tools",
        )
    for name, (kind, called) in _KINDS.items():
        if not isinstance(function.get(name), kind | None):
            raise RequestError(
                f"{where}.function.{name} must be {called}, not {function[name]!r:.80}", "tools"
            )
    if function.get("parameters") is not None:
        check_parameters(f"{where}.function.parameters", function["parameters"])
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None
