"""Reads from OpenAI's parameters what the decision needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.errors import RequestError
from nearfar.routing.sides import SideCall
from nearfar.routing.types import MODES, Feature, Mode
from nearfar.suggestions import advised

_FORMATS: dict[str, Feature] = {
    "json_object": "json_object", "json_schema": "json_schema", "regex": "grammar", "grammar": "grammar",
}  # fmt: skip


@dataclass(frozen=True)
class Hints:
    """A request's hints for its own routing (`x_nearfar`). `conversation`: an id, the same for all turns of a
    conversation.
    """

    mode: Mode | None = None
    private: bool = False
    conversation: str | None = None
    expected_tokens: int | None = None

    @classmethod
    def parse(cls, data: Any) -> Hints:
        """Check and parse `x_nearfar`. Raises RequestError that names the mistake: a misspelt `private` must
        not pass.
        """
        if not isinstance(data or {}, Mapping):
            raise RequestError(
                f"x_nearfar must be an object with {', '.join(_HINTS)}, not {data!r:.60}",
                "x_nearfar",
            )
        given = {name: value for name, value in (data or {}).items() if value is not None}
        unknown = sorted(str(name) for name in set(given) - set(_HINTS))
        if unknown:
            raise RequestError(
                f"x_nearfar has no field {', '.join(unknown)}{advised(unknown, _HINTS)}", "x_nearfar"
            )
        for name, (right, words) in _CHECKS.items():
            if name in given and not right(given[name]):
                raise RequestError(f"x_nearfar.{name} must be {words}, not {given[name]!r}", "x_nearfar")
        return cls(**given)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mode": (lambda value: isinstance(value, str) and value in MODES, f"one of {', '.join(MODES)}"),
    "private": (lambda value: isinstance(value, bool), "true or false"),
    "conversation": (lambda value: isinstance(value, str), "a string"),
    "expected_tokens": (lambda value: type(value) is int and value > 0, "a whole number from 1"),
}
_HINTS = tuple(_CHECKS)


@dataclass(frozen=True)
class Asked:
    """A request without its hints, as the sides may see it, and the hints."""

    messages: tuple[dict[str, Any], ...]
    params: dict[str, Any]
    hints: Hints


def hints_of(messages: Any, params: Mapping[str, Any]) -> Asked:
    """Read a request's routing hints: `x_nearfar` at the top, in `extra_body`, and (private only) in a
    message.

    The fields of `extra_body` become fields of the request. Raises RequestError for similar names in other
    places.
    """
    extra = params.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise RequestError(f"extra_body must be an object, not {extra!r:.60}", "extra_body")
    if wrong := sorted({"messages", "stream", "signal", "extra_body"} & set(extra)):
        raise RequestError(
            f"extra_body must not have {', '.join(wrong)}: give it as a parameter, not in extra_body",
            "extra_body",
        )
    merged = {**params, **extra}
    for name in ("extra_body", "x_nearfar"):
        merged.pop(name, None)
    _no_strangers(merged, "the request")
    if (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(each, Mapping) for each in messages)
    ):
        raise RequestError("messages must be a list of at least one {'role', 'content'}", "messages")
    said = [Hints.parse(params.get("x_nearfar")), Hints.parse(extra.get("x_nearfar"))]
    plain = []
    for message in messages:
        _no_strangers(message, "a message")
        own = Hints.parse(message.get("x_nearfar"))
        if own != Hints(private=own.private):
            raise RequestError("the x_nearfar of a message says private and nothing else", "messages")
        said.append(own)
        plain.append({name: value for name, value in message.items() if name != "x_nearfar"})
    return Asked(tuple(plain), merged, _together(said))


def _no_strangers(given: Mapping[str, Any], where: str) -> None:
    for name in given:
        if name in ("private", "hints") or (str(name).startswith("x_") and name != "x_nearfar"):
            raise RequestError(
                f"{where} has no field {name}; what it says of its routing goes into x_nearfar", str(name)
            )


def _together(said: list[Hints]) -> Hints:
    """Merge the hints; the request is private if any of them says so. Raises RequestError where they
    contradict each other.
    """
    found: dict[str, Any] = {"private": any(hints.private for hints in said)}
    for name in ("mode", "conversation", "expected_tokens"):
        values = {getattr(hints, name) for hints in said} - {None}
        if len(values) > 1:
            raise RequestError(f"x_nearfar.{name} is given twice with different values", "x_nearfar")
        found[name] = values.pop() if values else None
    return Hints(**found)


def limit_of(params: Mapping[str, Any], default: int) -> int:
    """Return the most tokens that the answer may have."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = params.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a whole number from 1, not {value!r}", name)
            return value
    return default


def features_of(messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any]) -> tuple[Feature, ...]:
    """Return the features that a side needs for the request."""
    found: list[Feature] = []
    if params.get("tools") and params.get("tool_choice") != "none":
        found.append("tools")
    kind = (params.get("response_format") or {}).get("type", "text")
    if kind in _FORMATS:
        found.append(_FORMATS[kind])
    parts = [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    ]
    if any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in parts):
        found.append("images")
    if params.get("logprobs"):
        found.append("logprobs")
    if params.get("reasoning_effort"):
        found.append("reasoning")
    return tuple(found)


def call_of(
    messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any], default_limit: int
) -> SideCall:
    """Make the call for either side. Raises RequestError for parameters that the client does not support."""
    if params.get("n") not in (None, 1):
        raise RequestError("n: the hybrid client gives one answer per request; send several requests", "n")
    if params.get("continue_final_message"):
        raise RequestError(
            "continue_final_message is the hybrid client's own means; ask a side directly",
            "continue_final_message",
        )
    top = int(params.get("top_logprobs") or 0) if params.get("logprobs") else None
    return SideCall(messages, dict(params), limit_of(params, default_limit), top_logprobs=top)


def is_plain(params: Mapping[str, Any]) -> bool:
    """Whether the text of an answer is all that another side must know to continue it."""
    kind = (params.get("response_format") or {}).get("type", "text")
    return not params.get("tools") and kind == "text"
