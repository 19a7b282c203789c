"""A small request for each path of the server that takes a body."""

from __future__ import annotations

from typing import Any

HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = {"type": "predicate", "instructions": "Is it a greeting?"}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/decisions": {"input": "Hello", "questions": [QUESTION]},
    "/v1/score": {"items": ["Hello"], "labels": ["yes", "no"]},
    "/v1/rerank": {"query": "Hello", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "Hello", "documents": ["a", "b"]},
    "/v1/tokenize": {"prompt": "Hello"},
    "/v1/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "Hello"},
    "/api/embed": {"input": "Hello"},
    "/api/embeddings": {"prompt": "Hello"},
    "/api/show": {},
}
"""A body for each path that is answered."""


def within(field: str, value: Any) -> dict[str, Any]:
    """A body with one field, which may be inside an object."""
    place, _, name = field.rpartition(".")
    return {place: {name: value}} if place else {name: value}
