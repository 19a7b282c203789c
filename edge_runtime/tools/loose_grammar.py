"""Regular expressions that enforce the schemas of tools in calls as loose.py reads them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from typing import Final

from nearfar.edge_runtime.tools.loose import WORDS

TRIGGER: Final = '"name":'
"""The text from which on a grammar checks whether a call follows."""
_BLANK = r"[ \t\r\n]*"
_BEYOND = r"[^\x00-\x7f]"
_LINE = r"[^\n]*"
MEMBERS: Final = r"""root ::= ws ("," ws string ws ":" ws value ws)* "}"
value ::= string | number | "true" | "false" | "null" | object | array
object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"
array ::= "[" ws (value ws ("," ws value ws)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" escape)* "\""
escape ::= ["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \t\r\n]*
"""
"""Further members after the arguments of a call, so that the call stays a complete JSON object."""
QUOTE: Final = '"'
FEW: Final = 4


def behind_name(name: str) -> str:
    """A regular expression of the text between TRIGGER and the arguments of a call of this tool."""
    return f'{_BLANK}"{escaped(_written(name))}"{_BLANK},{_BLANK}"({"|".join(WORDS)})"{_BLANK}:{_BLANK}'


def no_call_of(names: Collection[str]) -> str:
    """A regular expression of the rest of a line after TRIGGER that is not a call of one of these tools.

    xgrammar stores a mask for each place in it. So a name that begins with FEW characters of a tool's name
    counts as that name, and a key after it that begins as one of WORDS counts as that word.
    """
    key = f"{QUOTE}({_diverging([word[0] for word in WORDS])})"
    value = f"{_BLANK}({_not(',')}|,{_BLANK}({_not(QUOTE)}|{key}))"
    spelled = [f"{_written(name)}{QUOTE}" for name in names]
    others = f"{_diverging([name[:FEW] for name in spelled])}|({_any(spelled)}){value}"
    return f"{_BLANK}({_not(QUOTE)}|{QUOTE}({others}))"


def _not(mark: str) -> str:
    """A regular expression of a line that begins with neither a blank nor the mark."""
    return f"[^ \\t\\r\\n{mark}]{_LINE}"


def _written(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _any(texts: Collection[str]) -> str:
    return "|".join(map(escaped, sorted(texts)))


def _diverging(texts: Collection[str]) -> str:
    """A regular expression of the shortest texts with which none of `texts` begins.

    Characters beyond ASCII are written once after all beginnings: xgrammar needs a dozen states for them.
    """
    return f"{_leaving(texts)}|{_beginning(texts)}{_BEYOND}{_LINE}"


def _branches(texts: Collection[str]) -> list[tuple[str, list[str]]]:
    """The rests of the texts by their first character, sorted."""
    firsts = sorted({text[0] for text in texts if text})
    return [(char, [text[1:] for text in texts if text.startswith(char)]) for char in firsts]


def _leaving(texts: Collection[str]) -> str:
    """A regular expression of lines that leave the texts at an ASCII character."""
    branches = _branches(texts)
    ways = [f"[{_ascii_but({ord(char) for char, _ in branches})}]{_LINE}"]
    ways += [f"{escaped(char)}({_leaving(left)})" for char, left in branches if any(left)]
    return "|".join(ways)


def _beginning(texts: Collection[str]) -> str:
    """A regular expression of every proper beginning of the texts."""
    ways = [f"{escaped(char)}{_beginning(left)}" for char, left in _branches(texts) if any(left)]
    return f"({'|'.join(ways)})?" if ways else ""


def _ascii_but(codes: Collection[int]) -> str:
    """The ranges of ASCII without these characters, for a character class."""
    edges = [-1, *sorted(code for code in codes if code < 128), 128]
    spans = [(low + 1, high - 1) for low, high in itertools.pairwise(edges) if low + 1 <= high - 1]
    return "".join(f"\\x{low:02x}-\\x{high:02x}" for low, high in spans)


def escaped(text: str) -> str:
    """Escape a text as a regular expression of xgrammar, llguidance and JavaScript."""
    return "".join(
        "\\" + char if not char.isalnum() and char not in " \"'<>:;,_%&#@!~`=" else char for char in text
    )
