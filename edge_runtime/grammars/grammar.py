"""A grammar as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_GRAMMAR_BYTES = 64 << 10
"""Bytes that the text of a grammar may have."""


@dataclass(frozen=True)
class Grammar:
    """What the answer must match: kind and its text (a JSON schema, a regular expression, an EBNF grammar).

    "json_object" has an empty text. "structural_tag" (xgrammar's JSON) is what both sides make where tools
    or reasoning stand in an answer: edge_runtime.tools.asking.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str

    @property
    def param(self) -> Literal["tools", "response_format"]:
        """The parameter of a request that asks for it."""
        of_tools = self.kind == "structural_tag" and '"param": "tools"' in self.text
        return "tools" if of_tools else "response_format"
