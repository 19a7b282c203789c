"""A grammar as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_GRAMMAR_BYTES = 64 << 10
"""That the text of a grammar may have."""


@dataclass(frozen=True)
class Grammar:
    """What the answer must match: kind and its text (a JSON schema, a regular expression, an EBNF grammar).

    "json_object" has an empty text. "structural_tag" (xgrammar's) is only the server's.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str
