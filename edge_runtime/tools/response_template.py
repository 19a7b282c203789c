"""Converts a tokenizer's `response_template`, transformers' description of answers, to fields of an
AnswerFormat.

Regular expressions in it are accepted in the forms that templates use: text with blanks around it, and a
group `name` for the name of a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nearfar.errors import ArtifactError

Told = dict[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")
_NAME = re.compile(r"\(\?P<name>[^()]*(?:\([^()]*\)[^()]*)*\)")
_BLANK = re.compile(r"\\[sn][*+?]?|\n")
_XML = re.compile(r"(.*)\(\?P<key>\[\^[^\]]*\]\+?\)(.*)\(\?P<value>\.\*\?\)(.*)", re.DOTALL)


class _Other(Exception):
    """The template uses something that no AnswerFormat can express."""


def told_by(template: object) -> Told | None:
    """The format that a response_template describes; None if there is none or an AnswerFormat cannot express
    it.

    For None the chat template is used. ArtifactError if it is not a record.
    """
    if template is None:
        return None
    if not isinstance(template, Mapping) or not isinstance(template.get("fields"), Mapping):
        raise ArtifactError("response_template in tokenizer_config.json has no fields: correct it")
    fields = template["fields"]
    told: Told = {"family": "response_template"}
    try:
        for name in _REASONING:
            if name in fields:
                told["reasoning"] = {
                    "begin": _literal(fields[name], "open"), "end": _literal(fields[name], "close")
                }  # fmt: skip
                break
        if "tool_calls" in fields:
            told["calls"] = _calls(fields["tool_calls"])
    except (_Other, KeyError, TypeError, IndexError):
        return None
    return told


def _calls(field: Mapping[str, Any]) -> Told:
    opened, close = field.get("open_pattern"), _literal(field, "close", missing="")
    wanted = field.get("transform", {})
    function = wanted.get("function", wanted) if isinstance(wanted, Mapping) else wanted
    content, given = field.get("content", "text"), field.get("content_args", {})
    if isinstance(opened, str) and "(?P<name>" in opened:
        named = _NAME.search(opened)
        if named is None or function != {"name": "{name}", "arguments": "{content}"}:
            raise _Other
        begin, before = _parted(_plain(opened[: named.start()]))
        made: Told = {"begin": begin, "end": close, "named": {"before": before}}
        after = _plain(opened[named.end() :])
        if after:
            made["named"]["after"] = after
        _spelled(made, content, given)
    else:
        made = {"begin": _literal(field, "open"), "end": close}
        if content != "json" or given:
            raise _Other
        each = bool(field.get("transform_each"))
        names = _names(function, each)
        made |= {key: name for key, name in names.items() if key != name}
        if each:
            made["listed"] = True
    if field.get("repeats") and not made.get("listed"):
        made["repeats"] = True
    return made


def _names(function: Any, each: bool) -> dict[str, str]:
    """The keys of a call's name and arguments."""
    if function == "{content}":
        return {"name": "name", "arguments": "arguments"}
    lead = "" if each else "content."
    made = {}
    for key in ("name", "arguments"):
        found = re.fullmatch(rf"\{{{re.escape(lead)}(\w+)\}}", function[key])
        if found is None:
            raise _Other
        made[key] = found[1]
    return made


def _spelled(made: Told, content: str, given: Mapping[str, Any]) -> None:
    """Add the spelling of arguments after a name: JSON, keys without quotes, or tags."""
    if content == "json" and not given:
        return
    if content == "json" and given.get("unquoted_keys") and len(given.get("string_delims", ())) == 1:
        quotes = list(given["string_delims"][0])
        made["spelling"] = {
            "begin": "{", "end": "}", "after_name": ":", "separator": ",", "quotes": quotes
        }  # fmt: skip
        return
    found = _XML.fullmatch(given.get("tag_pattern", "")) if content == "xml-inline" else None
    if found is None or set(given) - {"tag_pattern"}:
        raise _Other
    before, after, behind = (_plain(part) for part in found.groups())
    end, close = _parted(made["end"])
    made["end"], made["blank"], made["separator"] = close or end, "\n", "\n"
    made["named"] = {**made["named"], "after": made["named"].get("after", "") + "\n"}
    made["named"]["until"] = made["named"]["after"].strip()
    made["spelling"] = {
        "begin": "",
        "end": end,
        "before_name": before,
        "after_name": after + "\n",
        "after_value": f"\n{behind}\n",
        "raw": True,
    }


def _parted(text: str) -> tuple[str, str]:
    """The first mark of a text, which ends in > or ], and the rest."""
    at = next((at for at, char in enumerate(text) if char in ">]"), len(text) - 1)
    return text[: at + 1], text[at + 1 :]


def _literal(field: Mapping[str, Any], kind: str, missing: str | None = None) -> str:
    """The text that opens or closes a field; the first one of several."""
    value = field.get(kind)
    if isinstance(value, list) and value:
        value = value[0]
    if value is None and f"{kind}_pattern" in field:
        value = _plain(field[f"{kind}_pattern"])
    if value is None:
        value = missing
    if not isinstance(value, str) or (not value and missing is None):
        raise _Other
    return value


def _plain(pattern: str) -> str:
    """Reduce a regular expression of one text with blanks in it to the text without the blanks."""
    text = _BLANK.sub("", pattern)
    made = re.sub(r"\\([^\w\s])", lambda found: f"\0{found[1]}", text)
    if re.search(r"(?<!\0)[\\.*+?()\[\]{}|^$]", made):
        raise _Other
    return made.replace("\0", "")
