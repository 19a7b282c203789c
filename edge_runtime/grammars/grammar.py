"""The grammar of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Grammar:
    """A constraint on an answer: the kind, and its text (a JSON schema, a regular expression, an EBNF
    grammar).

    "json_object" has an empty text. "structural_tag" (xgrammar's JSON) is made by both runtimes for answers
    with tools or reasoning: edge_runtime.tools.asking.
    """

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str

    @property
    def called(self) -> str:
        """What the grammar's author calls it, for messages."""
        return "grammar" if self.kind == "ebnf" else self.kind.replace("_", " ")

    @property
    def param(self) -> Literal["tools", "response_format"]:
        """The parameter of the request that has the grammar."""
        of_tools = self.kind == "structural_tag" and '"param": "tools"' in self.text
        return "tools" if of_tools else "response_format"
