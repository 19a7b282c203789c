"""Writes docs/server-fields.md: the class of each field of a request, one table for all APIs of the server.

    python scripts/server_fields.py

The table is read from the request models. A test compares the page with them, and each class with what the
server does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from nearfar.fallback_server.http.apis.decisions import DecisionRequest
from nearfar.fallback_server.http.apis.messages import CountRequest, MessageRequest
from nearfar.fallback_server.http.apis.ollama import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    NamedBody,
)
from nearfar.fallback_server.http.apis.rerank import RerankRequest
from nearfar.fallback_server.http.apis.responses import ResponseRequest
from nearfar.fallback_server.http.apis.score import ScoreBody
from nearfar.fallback_server.http.apis.tokens_routes import DetokenizeRequest, TokenizeRequest
from nearfar.fallback_server.http.fields import HINT, PASSED, SILENT, Only, Strict
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest, EmbeddingRequest

PATHS: dict[str, type[Strict]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/decisions": DecisionRequest,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/tokenize": TokenizeRequest,
    "/v1/detokenize": DetokenizeRequest,
    "/api/chat": ChatBody,
    "/api/generate": GenerateBody,
    "/api/embed": EmbedBody,
    "/api/embeddings": EmbeddingsBody,
    "/api/show": NamedBody,
}
"""The model of the request body by path."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "server-fields.md"
BEGIN, END = "<!-- generated: fields -->\n", "<!-- end -->\n"


class FieldClass(StrEnum):
    """What the server does with a field that it knows. Fields that it does not know are ignored."""

    FOLLOWED = "followed"
    HINT = "followed where the chat template has a variable for it, else ignored"
    IGNORED = "ignored, whatever the value"
    PASSED = "for servers behind this one"
    NEUTRAL = "refused, unless the value changes nothing"


@dataclass(frozen=True)
class Row:
    """A field: its place in the request (for example "messages."), its name in JSON, its class, and for
    NEUTRAL the values, as JSON, that change nothing.
    """

    place: str
    name: str
    kind: FieldClass
    values: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The field with its place."""
        return self.place + self.name


def row_of(place: str, name: str, field: FieldInfo) -> Row:
    """Return the row of a field of a request model."""
    name, marks = field.alias or name, field.metadata
    if any(one is SILENT for one in marks):
        return Row(place, name, FieldClass.IGNORED)
    if only := next((one for one in marks if isinstance(one, Only)), None):
        return Row(place, name, FieldClass.NEUTRAL, tuple(map(json.dumps, only.values)))
    if any(one is PASSED for one in marks):
        return Row(place, name, FieldClass.PASSED)
    return Row(place, name, FieldClass.HINT if any(one is HINT for one in marks) else FieldClass.FOLLOWED)


def rows(model: type[Strict]) -> list[Row]:
    """Return the rows of a request and of all objects in it, each once."""
    return list(
        dict.fromkeys(
            row_of(each.place, name, field)
            for each in models_of(model)
            for name, field in each.model_fields.items()
        )
    )


def models_of(model: type[Strict]) -> list[type[Strict]]:
    """Return the models of a request and of the objects in it that are not ignored as a whole, each once."""
    found: list[type[Strict]] = []

    def take(kind: type[Strict]) -> None:
        if kind in found:
            return
        found.append(kind)
        for name, field in kind.model_fields.items():
            if row_of(kind.place, name, field).kind is not FieldClass.IGNORED:
                for inner in _models_in(field.annotation):
                    take(inner)

    take(model)
    return found


def _models_in(kind: Any) -> Iterator[type[Strict]]:
    """Yield the request models in a type."""
    if isinstance(kind, type) and issubclass(kind, Strict):
        yield kind
    for inner in get_args(kind):
        yield from _models_in(inner)


def table() -> str:
    """Return the tables of all paths as Markdown."""
    groups: dict[str, list[str]] = {}
    for path, model in PATHS.items():
        groups.setdefault(_lines(rows(model)), []).append(path)
    parts = []
    for lines, paths in groups.items():
        title = "### " + ", ".join(f"`{path}`" for path in paths)
        parts.append(f"{title}\n\n| in | class | fields |\n|---|---|---|\n{lines}")
    return "\n".join(parts)


def _lines(found: Iterable[Row]) -> str:
    places: dict[tuple[str, FieldClass], list[str]] = {}
    for each in found:
        places.setdefault((each.place, each.kind), []).append(_named(each))
    order = list(dict.fromkeys(place for place, _ in places))
    return "".join(
        f"| {f'`{place[:-1]}`' if place else 'the request'} | {kind} | {', '.join(places[place, kind])} |\n"
        for place in order
        for kind in FieldClass
        if (place, kind) in places
    )


def _named(of: Row) -> str:
    taken = " or ".join(f"`{value}`" for value in of.values)
    return f"`{of.name}`" + (f" ({taken})" if taken else "")


def filled(text: str) -> str:
    """Return the page with its generated part replaced."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main() -> int:
    """Write the page; return the exit status."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
