"""The paths of the APIs, to suggest one for an unknown path. The app knows its own only with its schema."""

from __future__ import annotations

from nearfar.suggestions import suggested

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/decisions", "/v1/score", "/v1/models", "/v1/tokenize", "/v1/detokenize", "/v1/rerank",
)  # fmt: skip
OLLAMA = "/api/"
"""Prefix of the paths of Ollama's API."""
OLLAMA_PATHS = (
    "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show",
    "/api/version",
)  # fmt: skip
MESSAGES = "/v1/messages"
"""Prefix of the paths of Anthropic's API."""


def no_path(asked: str) -> str:
    """Return the message for an unknown path: with the closest path of OpenAI's and Anthropic's APIs, or else
    all paths of the same API.
    """
    ollama = asked.startswith(OLLAMA)
    *others, last = OLLAMA_PATHS if ollama else PATHS
    there = f": this server speaks {', '.join(others)} and {last}"
    path = asked if asked.startswith("/v1/") else f"/v1{asked}"
    close = "" if ollama else suggested(path, PATHS)
    return f"there is no {asked[:80]} here{close or there}"
