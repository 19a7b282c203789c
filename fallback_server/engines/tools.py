"""Tools: how they get into the prompt, and the grammar that keeps calls to their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import ToolChoice
from nearfar.fallback_server.grammars import BLANKS, CALL_BLANKS
from nearfar.fallback_server.marks import CallFormat, Marks

Record = dict[str, Any]


def offered(tools: Seq[Mapping[str, Any]], choice: ToolChoice) -> tuple[Mapping[str, Any], ...]:
    """The tools that may be called."""
    if choice.mode == "none":
        return ()
    if choice.name is None:
        return tuple(tools)
    named = tuple(tool for tool in tools if tool["function"]["name"] == choice.name)
    if not named:
        raise RequestError(f"tool_choice names {choice.name!r}, which is not among the tools", "tool_choice")
    return named


def call_grammar(
    tools: Seq[Mapping[str, Any]], choice: ToolChoice, form: CallFormat, reasoning: Marks | None, open_: bool
) -> Grammar:
    """Free text with calls in it; where a call is required, calls only. Arguments match the schema of their
    tool.

    The format is xgrammar's structural tag. Reasoning may come before required calls, and nothing but another
    call after.
    """
    tags = [_tag(tool["function"], form) for tool in tools]
    if choice.mode != "required" and choice.name is None:
        calls: Record = {
            "type": "triggered_tags",
            "triggers": [form.begin],
            "tags": tags,
            "stop_after_first": not form.end,
        }
        return structural(calls)
    one: Record = {"type": "or", "elements": tags}
    if not choice.parallel or choice.name is not None or not form.end:
        return structural(after_reasoning(one, reasoning, open_))
    more = {"type": "star", "content": {"type": "sequence", "elements": [_blank(), one]}}
    return structural(after_reasoning({"type": "sequence", "elements": [one, more]}, reasoning, open_))


def after_reasoning(content: Record, reasoning: Marks | None, open_: bool) -> Record:
    """The content, with room for a section of reasoning before it. `open_`: the prompt has begun that
    section.
    """
    if reasoning is None:
        return content
    begin = "" if open_ else reasoning.begin
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.end}
    if open_:
        return {"type": "sequence", "elements": [thought, _blank(), content]}
    return {
        "type": "or",
        "elements": [{"type": "sequence", "elements": [thought, _blank(), content]}, content],
    }


def structural(content: Record) -> Grammar:
    """As a grammar."""
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


def as_format(grammar: Grammar) -> Record:
    """A grammar as part of a structural tag."""
    match grammar.kind:
        case "json_schema":
            return _json(json.loads(grammar.text), BLANKS, True, "response_format")
        case "json_object":
            return _json({"type": "object", "additionalProperties": True}, BLANKS, True, "response_format")
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            form: Record = json.loads(grammar.text)["format"]
            return form


def described(
    messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]], form: CallFormat
) -> list[Record]:
    """The messages with the tools told in words, for a chat template that knows nothing of tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    example = json.dumps({"name": "<name>", form.arguments: {"<argument>": "<value>"}})
    text = (
        "You can call these functions:\n" + "\n".join(lines) + "\n"
        f"To call one, write {form.begin}{example}{form.end} and nothing else."
    )
    plain = in_words(messages, form)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def with_parsed_arguments(message: Mapping[str, Any]) -> Record:
    """Earlier calls with their arguments as records: what templates expect. OpenAI sends them as JSON
    text.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError:
            raise RequestError(
                f"messages: the arguments of the call of {function['name']!r} are not JSON", "messages"
            ) from None
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)


def in_words(messages: Seq[Mapping[str, Any]], form: CallFormat) -> list[Record]:
    """Messages without fields and roles for tools, for a chat template that would leave them out."""
    return [_plain(message, form) for message in messages]


def _plain(message: Mapping[str, Any], form: CallFormat) -> Record:
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result: {message['content']}"}
    calls = message.get("tool_calls") or ()
    if not calls:
        return dict(message)
    written = [
        form.begin
        + json.dumps({"name": c["function"]["name"], form.arguments: c["function"]["arguments"]})
        + form.end
        for c in calls
    ]
    return {"role": message["role"], "content": "\n".join([message.get("content") or "", *written]).strip()}


def _tag(function: Mapping[str, Any], form: CallFormat) -> Record:
    """One call. The blank line after the mark is how models were trained to write it; JSON allows it
    either way.
    """
    name = json.dumps(function["name"], ensure_ascii=False)
    schema = function.get("parameters") or {"type": "object"}
    head, tail = f'{{"name": {name}, "{form.arguments}": ', "}"
    if form.listed:
        head, tail = "[" + head, tail + "]"
    newline = "\n" if form.end and not form.listed else ""
    return {
        "type": "tag",
        "begin": f"{form.begin}{newline}{head}",
        "content": _json(schema, CALL_BLANKS, function.get("strict") is True, "tools"),
        "end": f"{tail}{newline}{form.end}",
    }


def _json(schema: Any, blanks: int, strict: bool, param: str) -> Record:
    """Xgrammar's record; `strict` and `param` are for `schema.narrowed`, which takes them out."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        "max_whitespace_cnt": blanks,
        "strict": strict,
        "param": param,
    }


def _blank() -> Record:
    return {"type": "regex", "pattern": r"\n{0,2}"}
