"""Prepares tools and calls in messages for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.tools.arguments import arguments_of
from nearfar.edge_runtime.tools.writing import written_call
from nearfar.errors import RequestError
from nearfar.format.answers import AnswerFormat, CallFormat
from nearfar.format.requests import ROLES

Record = dict[str, Any]
DEFAULT = CallFormat("<tool_call>", "</tool_call>")
"""The form of earlier calls in messages if a model has no format for calls."""


TEXTS = ("text", "refusal")
"""Types of parts that are text; the text is in the field of the same name."""


def texts_of(role: str) -> tuple[str, ...]:
    """The types of parts that are text in a message of a role; only an assistant refuses."""
    return TEXTS if role == "assistant" else TEXTS[:1]


def canonical(message: Mapping[str, Any]) -> Record:
    """A checked message in the form that every chat template gets, whichever API it came through.

    The content is one text, including a refusal; a developer's instructions become the system's; fields
    without content (null, no calls, annotations) are left out. A content with parts that are not text stays a
    list.
    """
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, Seq) and not isinstance(content, str):
        texts = [part[part["type"]] if part["type"] in TEXTS else None for part in content]
        known = [text for text in texts if text is not None]
        content = "".join(known) if len(known) == len(texts) else [
            {"type": part["type"]} if text is None else text
            for part, text in zip(content, texts, strict=True)
        ]  # fmt: skip
    role = "system" if message["role"] == "developer" else message["role"]
    made: Record = {"role": role, "content": content or refusal or ""}
    reasoning = message.get("reasoning_content")
    given = {
        "name": message.get("name"),
        "tool_call_id": message.get("tool_call_id"),
        # The second is vLLM's name for the field that templates know as the first.
        "reasoning_content": message.get("reasoning") if reasoning is None else reasoning,
        "tool_calls": [_call(call) for call in message.get("tool_calls") or ()] or None,
    }
    return made | {name: value for name, value in given.items() if value is not None}


def _call(call: Mapping[str, Any]) -> Record:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return {"id": call["id"], "type": "function", "function": function}


def knows_tools(template: str) -> bool:
    """Whether a chat template renders `tools` itself."""
    return "tools" in template


def prepared(
    messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]], form: AnswerFormat, template: str
) -> tuple[list[Record], Record]:
    """The messages as the template accepts them, and its variables. `tools`: the tools that may be called."""
    calls = form.calls or DEFAULT
    for message in messages:
        if (role := message["role"]) not in ROLES and role not in template:
            raise RequestError(
                f"messages: this model's chat template knows no role {role!r:.80}, and would ignore the "
                f"message; there are {', '.join(ROLES)}",
                "messages",
            )
    if knows_tools(template):
        variables = {"tools": [dict(tool) for tool in tools]} if tools else {}
        return [with_parsed_arguments(message) for message in messages], variables
    return (described(messages, tools, calls) if tools else in_words(messages, calls)), {}


def described(
    messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]], form: CallFormat
) -> list[Record]:
    """The messages with the tools described in words, for a chat template that does not render tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = written_call(form, "<name>", {"<argument>": "<value>"}, blank=False)
    text = (
        "You can call these functions:\n" + "\n".join(lines) + "\n"
        f"To call one, write {example} and nothing else."
    )
    plain = in_words(messages, form)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def in_words(messages: Seq[Mapping[str, Any]], form: CallFormat) -> list[Record]:
    """Messages without fields and roles for tools, for a chat template that would ignore them."""
    return [_plain(message, form) for message in messages]


def _plain(message: Mapping[str, Any], form: CallFormat) -> Record:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result: {message['content']}"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = with_parsed_arguments(message)["tool_calls"]
    written = [
        written_call(form, call["function"]["name"], call["function"]["arguments"], blank=False)
        for call in calls
    ]
    return {"role": message["role"], "content": "\n".join([message.get("content") or "", *written]).strip()}


def with_parsed_arguments(message: Mapping[str, Any]) -> Record:
    """Earlier calls with their arguments as objects, as templates expect. OpenAI sends them as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        calls.append({**call, "function": {**function, "arguments": arguments_of(function["arguments"])}})
    return {**message, "tool_calls": calls} if calls else dict(message)
