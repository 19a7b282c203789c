"""What the decision must know of a request, read off OpenAI's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nearfar.errors import RequestError
from nearfar.routing.sides import Call
from nearfar.routing.types import MODES, Feature, Mode

_FORMATS: dict[str, Feature] = {
    "json_object": "json_object", "json_schema": "json_schema", "regex": "grammar", "grammar": "grammar",
}  # fmt: skip


@dataclass(frozen=True)
class Hints:
    """What a request says of its own routing (`x_nearfar`). `conversation`: an id, the same for all turns of one."""

    mode: Mode | None = None
    private: bool = False
    conversation: str | None = None
    expected_tokens: int | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any] | None) -> Hints:
        """Check them. RequestError names what is wrong: a misspelt `private` must not pass."""
        given = dict(data or {})
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise RequestError(f"x_nearfar has no field {', '.join(unknown)}", "x_nearfar")
        made = cls(**given)
        if made.mode is not None and made.mode not in MODES:
            raise RequestError(f"x_nearfar.mode must be one of {', '.join(MODES)}, not {made.mode!r}", "x_nearfar")
        if not isinstance(made.private, bool):
            raise RequestError(f"x_nearfar.private must be true or false, not {made.private!r}", "x_nearfar")
        return made


def limit_of(params: Mapping[str, Any], default: int) -> int:
    """Tokens that the answer may have."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = params.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a whole number from 1, not {value!r}", name)
            return value
    return default


def features_of(messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any]) -> tuple[Feature, ...]:
    """What a side must be able to do."""
    found: list[Feature] = []
    if params.get("tools") and params.get("tool_choice") != "none":
        found.append("tools")
    kind = (params.get("response_format") or {}).get("type", "text")
    if kind in _FORMATS:
        found.append(_FORMATS[kind])
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    if any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts):
        found.append("images")
    if params.get("logprobs"):
        found.append("logprobs")
    if params.get("reasoning_effort"):
        found.append("reasoning")
    return tuple(found)


def call_of(messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any], default_limit: int) -> Call:
    """The call that either side gets. RequestError for what the client does not do."""
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError("messages must be a list of at least one {'role', 'content'}", "messages")
    if params.get("n") not in (None, 1):
        raise RequestError("n: the hybrid client gives one answer a request; ask several times", "n")
    if params.get("continue_final_message"):
        raise RequestError("continue_final_message is the hybrid client's own means; ask a side directly", "continue_final_message")
    top = int(params.get("top_logprobs") or 0) if params.get("logprobs") else None
    return Call(messages, dict(params), limit_of(params, default_limit), top_logprobs=top)


def is_plain(params: Mapping[str, Any]) -> bool:
    """Whether the text so far says all that another side must know to go on with an answer."""
    kind = (params.get("response_format") or {}).get("type", "text")
    return not params.get("tools") and kind == "text"
