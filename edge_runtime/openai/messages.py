"""Checks the messages of a request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nearfar.edge_runtime.openai.tooling import check_calls
from nearfar.edge_runtime.tools.messages import canonical, texts_of
from nearfar.errors import RequestError
from nearfar.format.requests import ROLES
from nearfar.suggestions import advised


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages and return them in the form that chat templates get."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Seq) or not messages:
        raise RequestError(
            f"messages must be a list of at least one {{'role', 'content'}}, not {messages!r:.80}", "messages"
        )
    return [_message(index, message) for index, message in enumerate(messages)]


_MESSAGE = frozenset(
    {"role", "content", "name", "refusal", "annotations", "tool_calls", "tool_call_id"}
    | {"reasoning_content", "reasoning"}
)
"""Fields of a message; the chat template decides which of them it uses."""


def _message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be {{'role', 'content'}}, not {message!r:.80}", "messages")
    if not isinstance(role := message.get("role"), str) or not role:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r:.80}", "messages")
    content = message.get("content")
    if isinstance(content, Seq) and not isinstance(content, str | bytes):
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in texts_of(role) or not isinstance(part.get(kind), str):
                raise RequestError(f"{where}: only text content is supported, not {part!r:.80}", "messages")
    elif not isinstance(content, str) and (content is not None or message["role"] != "assistant"):
        raise RequestError(f"{where}.content must be text, not {content!r:.80}", "messages")
    check_calls(where, message)
    for field in ("name", "refusal", "reasoning_content", "reasoning"):
        if not isinstance(message.get(field), str | None):
            raise RequestError(f"{where}.{field} must be a string, not {message[field]!r:.80}", "messages")
    for field, value in message.items():
        if field not in _MESSAGE and value is not None:
            raise RequestError(
                f"{where}.{field} is not a field of a message{advised([str(field)], _MESSAGE)}", "messages"
            )
    return canonical(message)
