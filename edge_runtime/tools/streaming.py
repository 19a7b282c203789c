"""Streams calls whose arguments are a JSON object: finds where they begin and end."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass

from nearfar.edge_runtime.tools.calls import BLANKS, NAME, argument_names
from nearfar.format.answers import CallFormat

_BLANK = f"[{BLANKS}]*"


@dataclass(frozen=True)
class CallHead:
    """The text before the arguments of a call: its name, whether it began a list, and where it ends."""

    name: str
    listed: bool
    end: int


def streamed(form: CallFormat, mark: str) -> bool:
    """Whether the arguments of a section's calls are plain JSON that a grammar has enforced.

    The grammar follows the mark with which sections begin, or calls without marks; it does not see calls
    after another mark.
    """
    return form.spelling is None and (mark.endswith(form.begin) if mark else bool(form.bare))


def head_in(text: str, form: CallFormat, names: Collection[str], *, more: bool) -> CallHead | None:
    """The head of the call with which a text begins; `more`: it follows another call of a list.

    None: it is not complete, or is not in the form that models are told to write.
    """
    found = _pattern(form, more).match(text)
    if found is None or found["name"] not in names:
        return None
    return CallHead(found["name"], bool(found["list"]), found.end())


@functools.lru_cache(maxsize=64)
def _pattern(form: CallFormat, more: bool) -> re.Pattern[str]:
    before = "," if more else r"\[?" if form.listed else ""
    if form.named is not None:
        until = re.escape(form.named.until or form.named.after)
        passed = rf"(?:(?!{until})(?!\{{).)*{until}" if until else ""
        call = rf"{re.escape(form.named.before)}{_BLANK}(?P<name>{NAME.pattern}){passed}"
    else:
        words = "|".join(map(re.escape, argument_names(form)))
        name = rf'"{re.escape(form.name)}"{_BLANK}:{_BLANK}"(?P<name>[^"\\]+)"'
        call = rf'\{{{_BLANK}{name}{_BLANK},{_BLANK}"(?:{words})"{_BLANK}:'
    return re.compile(rf"{_BLANK}(?P<list>{before}){_BLANK}{call}{_BLANK}(?=\{{)", re.DOTALL)
