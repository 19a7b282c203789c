"""The settings that `/set` changes: sampling, and how an answer is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.openai.context import check_policy
from nearfar.edge_runtime.openai.parameters import ChatParams, chat_sampling
from nearfar.errors import RequestError
from nearfar.strict_json import loads

if TYPE_CHECKING:
    from nearfar.cli.session.session import Session

DEFAULT = "default"
"""The value that resets a setting."""


T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """A setting. `change` gets the typed value, and raises RequestError for an invalid one."""

    help: str
    show: Callable[[Session], str]
    change: Callable[[Session, str], None]


def _whole(text: str) -> int:
    return _number(text, int, "a whole number")


def _fraction(text: str) -> float:
    return _number(text, float, "a number")


def _number(text: str, kind: Callable[[str], T], called: str) -> T:
    try:
        return kind(text)
    except ValueError as error:
        raise RequestError(f"{text!r} is not {called}") from error


def _texts(text: str) -> list[str]:
    """Parse stop texts: a plain text, or JSON of a text or a list of texts."""
    if text[0] not in '["':
        return [text]
    try:
        read = loads(text)
    except ValueError as error:
        raise RequestError(f"{text} is not JSON: {error}") from error
    return read if isinstance(read, list) else [read]


def _policy(text: str) -> str:
    check_policy(text)
    return text


def _parameter(name: str, read: Callable[[str], Any], help: str) -> Setting:
    """Make the setting of a request parameter; the engine checks its value."""

    def show(session: Session) -> str:
        given = session.params.get(name)
        if given not in (None, []):
            return str(given)
        wanted = session.defaults.given.get(name)
        if wanted is not None:
            return f"{wanted:g}, the model's"
        usual = getattr(SamplingParams(), name, None)
        return "" if usual in (None, ()) else f"{usual:g}"

    def change(session: Session, text: str) -> None:
        value = None if text == DEFAULT else read(text)
        changed = cast(ChatParams, {**session.params, name: value})
        chat_sampling(changed, session.defaults)
        session.params = changed

    return Setting(help, show, change)


def _switch(name: str, help: str) -> Setting:
    """Make the setting of a session's attribute that is on or off."""

    def show(session: Session) -> str:
        return "on" if getattr(session, name) else "off"

    def change(session: Session, text: str) -> None:
        if text not in ("on", "off"):
            raise RequestError(f"{name} must be on or off, not {text!r}")
        setattr(session, name, text == "on")

    return Setting(help, show, change)


SETTINGS = {
    "temperature": _parameter("temperature", _fraction, "0 takes the likeliest token; higher is more varied"),
    "top_k": _parameter("top_k", _whole, "only the K likeliest tokens; 0: all"),
    "top_p": _parameter("top_p", _fraction, "only the likeliest tokens that make up this probability"),
    "min_p": _parameter("min_p", _fraction, "only tokens at least this likely, relative to the likeliest"),
    "repetition_penalty": _parameter(
        "repetition_penalty", _fraction, "above 1: tokens that occurred become less likely"
    ),
    "presence_penalty": _parameter(
        "presence_penalty",
        _fraction,
        "above 0: tokens that occurred become less likely, by the same for each",
    ),
    "frequency_penalty": _parameter(
        "frequency_penalty", _fraction, "above 0: tokens that occurred become less likely with each time"
    ),
    "max_tokens": _parameter("max_tokens", _whole, "longest answer; default: until the context is full"),
    "seed": _parameter("seed", _whole, "the same seed gives the same text; default: another each time"),
    "stop": _parameter("stop", _texts, "ends an answer: a text, or a JSON list of texts"),
    "context_policy": _parameter(
        "context_policy", _policy, "error or truncate-oldest, if the context is full"
    ),
    "markdown": _switch("markdown", "on or off: answers are rendered, or shown as they come"),
    "stats": _switch("stats", "on or off: speeds after each answer"),
}
