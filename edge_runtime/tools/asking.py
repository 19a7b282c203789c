"""The grammar of an answer when tools are offered, as xgrammar's structural tag.

Only forms of the browser's xgrammar are used: it accepts no empty `const_string` and no empty `separator`.
The keys `strict` and `param` of a `json_schema` are for the compiler (grammars.schema.narrowed). `spaced`:
models break its lines, so it allows as many blanks as a requested format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from nearfar.edge_runtime.grammars.grammar import Grammar
from nearfar.edge_runtime.grammars.schema import narrowed
from nearfar.edge_runtime.tools.affordable import ANY_OBJECT, is_any_object
from nearfar.edge_runtime.tools.loose_grammar import MEMBERS, TRIGGER, behind_name, escaped, no_call_of
from nearfar.edge_runtime.tools.parameters import argument_schema, check_schemas
from nearfar.edge_runtime.tools.spelled import spelled_arguments
from nearfar.edge_runtime.tools.tags import Tag, constant, either, in_order, repeated, tag
from nearfar.errors import RequestError
from nearfar.format.answers import AnswerFormat, CallFormat

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """Whether an answer may, must or must not call tools; `name`: the one tool that it must call."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def required(self) -> bool:
        """Whether an answer consists of calls only."""
        return self.mode == "required" or self.name is not None


AUTO = ToolChoice()


def offered(tools: Seq[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that may be called; RequestError if the choice cannot be met."""
    if choice.mode == "none":
        return ()
    if choice.required and not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    if choice.name is None:
        return tuple(tools)
    named = tuple(tool for tool in tools if tool["function"]["name"] == choice.name)
    if not named:
        raise RequestError(f"tool_choice names {choice.name!r}, which is not among the tools", "tool_choice")
    return named


def answer_grammar(
    form: AnswerFormat, tools: Seq[Tool], choice: ToolChoice, wanted: Grammar | None, reasoning_open: bool
) -> Grammar | None:
    """The grammar of an answer: calls of the offered tools, the requested format, or either.
    None: anything.

    Reasoning may come before; `reasoning_open`: the prompt has begun it. If calls are required, a requested
    format is ignored, since there is no other text.
    """
    calls = form.calls
    may = offered(tools, choice) if calls else ()
    if calls is None or not may:
        if wanted is None or (form.reasoning is None and not form.text):
            return wanted
        return _structural(_after_reasoning(form, _text_of(form, wanted), reasoning_open, must=True))
    check_schemas(may)
    for tool in may:
        _check_strict(tool["function"])
    # xgrammar 0.1.27 does not accept an unbounded repetition as an alternative to something else.
    many = calls.many if wanted is None or choice.required else calls.listed
    several = choice.parallel and choice.name is None and many
    if choice.required:
        content = _calls_only(calls, may, several)
    elif wanted is not None:
        content = either(_calls_only(calls, may, several), _text_of(form, wanted))
    else:
        content = _text_with_calls(calls, may, several)
    must = choice.required or wanted is not None
    return _structural(_after_reasoning(form, content, reasoning_open, must=must))


def _check_strict(function: Mapping[str, Any]) -> None:
    """Raise RequestError for a strict function whose schema no grammar can enforce; the error names it."""
    if function.get("strict") is not True:
        return
    try:
        narrowed(argument_schema(function), strict=True, param="tools")
    except RequestError as error:
        said = str(error).removeprefix("tools: the JSON schema ")
        raise RequestError(f"tools: the JSON schema of '{function['name']}' {said}", "tools") from error


def _structural(content: Tag) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


def _after_reasoning(form: AnswerFormat, content: Tag, opened: bool, *, must: bool) -> Tag:
    """The content, with room for a section of reasoning before it.

    `must`: every answer has the content, so reasoning that the prompt has begun must end.
    """
    marks = form.reasoning
    if marks is None:
        return content
    thought = tag("" if opened else marks.begin, {"type": "any_text"}, marks.end)
    between = constant(marks.after) if marks.after else {"type": "regex", "pattern": r"\n{0,2}"}
    thinking = in_order(thought, between, content)
    return thinking if opened and must else either(thinking, content)


def _text_of(form: AnswerFormat, wanted: Grammar) -> Tag:
    """The requested format, as text for the user."""
    content = as_tag(wanted)
    return in_order(constant(form.text), content) if form.text else content


def as_tag(grammar: Grammar) -> Tag:
    """A grammar as part of a structural tag."""
    match grammar.kind:
        case "json_schema":
            return _json(json.loads(grammar.text), True, "response_format")
        case "json_object":
            return _json({"type": "object", "additionalProperties": True}, True, "response_format")
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "structural_tag":
            form: Tag = json.loads(grammar.text)["format"]
            return form


def _text_with_calls(calls: CallFormat, tools: Seq[Tool], several: bool) -> Tag:
    """Any text; a text that begins as a call must be one. Calls without marks come first or not at all."""
    if calls.bare:
        starts = [start for start in (calls.bare, calls.begin) if start]
        return either(_calls_only(calls, tools, several), {"type": "regex", "pattern": _other_than(starts)})
    return {
        "type": "triggered_tags",
        "triggers": [calls.begin, TRIGGER],
        "tags": [*_sections(calls, tools, several), _loose(tools)],
        "stop_after_first": not (calls.repeats and several),
    }


def _loose(tools: Seq[Tool]) -> Tag:
    """Calls as JSON objects without marks around them, with any line breaks (loose.py). Tools whose arguments
    are any object share one alternative.
    """
    loosened = [tool["function"]["name"] for tool in tools if is_any_object(tool)]
    calls = either(
        *(_loose_call(tool["function"]) for tool in tools if not is_any_object(tool)),
        *([_loose_calls(loosened)] if loosened else ()),
    )
    other = no_call_of([tool["function"]["name"] for tool in tools])
    call = in_order(calls, {"type": "grammar", "grammar": MEMBERS})
    return tag(TRIGGER, either({"type": "regex", "pattern": other}, call), "")


def _loose_call(function: Mapping[str, Any]) -> Tag:
    schema, strict = argument_schema(function), function.get("strict") is True
    return in_order(
        {"type": "regex", "pattern": behind_name(function["name"])},
        {**_json(schema, strict, "tools"), "spaced": True},
    )


def _loose_calls(names: Seq[str]) -> Tag:
    pattern = "|".join(f"({behind_name(name)})" for name in names)
    return in_order(
        {"type": "regex", "pattern": pattern}, {**_json(ANY_OBJECT, False, "tools"), "spaced": True}
    )


def _calls_only(calls: CallFormat, tools: Seq[Tool], several: bool) -> Tag:
    sections = _sections(calls, tools, several) if calls.begin else []
    if calls.repeats and several and calls.separator:
        return repeated(sections, calls.separator)
    # xgrammar has no empty separator, and with triggered tags text between two calls is skipped
    if calls.repeats and several:
        return {
            "type": "triggered_tags", "triggers": [calls.begin], "tags": sections, "at_least_one": True
        }  # fmt: skip
    return either(*(_bare(calls, tools, several) if calls.bare else ()), *sections)


def _sections(calls: CallFormat, tools: Seq[Tool], several: bool) -> list[Tag]:
    """Sections between marks: one for each tool, or one with a list of calls of all tools."""
    begin, end = calls.begin + calls.blank, calls.blank + calls.end
    if not calls.listed:
        return [_around(begin, _call(calls, tool), end) for tool in tools]
    return [_around(begin + "[", call, "]" + end) for call in _list(calls, tools, several)]


def _bare(calls: CallFormat, tools: Seq[Tool], several: bool) -> list[Tag]:
    """Sections without marks."""
    if not calls.listed:
        return [_call(calls, tool) for tool in tools]
    return [_around("[", call, "]") for call in _list(calls, tools, several)]


def _list(calls: CallFormat, tools: Seq[Tool], several: bool) -> list[Tag]:
    """The content of the brackets: each tool's call, or calls of all tools."""
    each = [_call(calls, tool) for tool in tools]
    if not several:
        return each
    return [tag("", repeated(each, ", "), "")]


def _around(begin: str, inner: Tag, end: str) -> Tag:
    """A tag with more text before and after it."""
    return {**inner, "begin": begin + inner["begin"], "end": inner["end"] + end}


def _call(calls: CallFormat, tool: Tool) -> Tag:
    function = tool["function"]
    name, schema = function["name"], argument_schema(function)
    strict = function.get("strict") is True
    if calls.spelling is not None and calls.named is not None:
        kept = narrowed(schema, strict=strict, param="tools")
        return _around(
            calls.named.before + name + calls.named.after, spelled_arguments(calls.spelling, kept), ""
        )
    if calls.named is not None:
        return tag(calls.named.before + name + calls.named.after, _json(schema, strict, "tools"), "")
    written = json.dumps(name, ensure_ascii=False)
    begin = f'{{"{calls.name}": {written}, "{calls.arguments}": '
    return tag(begin, _json(schema, strict, "tools"), "}")


def _json(schema: Any, strict: bool, param: str) -> Tag:
    return {"type": "json_schema", "json_schema": schema, "strict": strict, "param": param}


def _other_than(starts: Seq[str]) -> str:
    """A regular expression of texts that begin with none of `starts`, including the empty text."""
    ways = []
    for begun in sorted({start[:at] for start in starts for at in range(len(start))}):
        if any(begun.startswith(start) for start in starts):
            continue
        nexts = sorted({start[len(begun)] for start in starts if start.startswith(begun) and start != begun})
        ways.append(escaped(begun) + rf"([^{escaped(''.join(nexts))}][\s\S]*)?")
    return "|".join(ways)
