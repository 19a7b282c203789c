"""What the client knows of a side: how to ask it, how it fails, and how fast it was."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nearfar.errors import NearfarError
from nearfar.routing.shapes import Piece
from nearfar.routing.speed import Speeds
from nearfar.routing.types import Feature

CHARS_PER_TOKEN = 4
"""For prompts whose tokenizer is not here."""


class SideError(NearfarError):
    """A side failed: the other may do better. `code` is short, for reasons: a status, timeout, connection,
    lost, cut.

    `retry_after`: seconds that it asked for. `busy`: it works, but takes nothing now.
    """

    def __init__(
        self, message: str, code: str, *, retry_after: float | None = None, busy: bool = False
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after, self.busy = code, retry_after, busy


@dataclass(frozen=True)
class Call:
    """What a side is asked for: OpenAI's parameters, and the beginning of the answer if there is one
    already.
    """

    messages: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    max_tokens: int
    prefix: str = ""
    top_logprobs: int | None = None

    def after(self, text: str, tokens: int) -> Call:
        """The call that goes on after `text`, the `tokens` tokens of the answer so far."""
        return replace(self, prefix=text, max_tokens=max(self.max_tokens - tokens, 1))

    @property
    def given(self) -> list[dict[str, Any]]:
        """The messages, the beginning of the answer included."""
        begun = [{"role": "assistant", "content": self.prefix}] if self.prefix else []
        return [*map(dict, self.messages), *begun]

    @property
    def body(self) -> dict[str, Any]:
        """Parameters of the call besides messages: greedy or not, limits, and whether the last message
        goes on.
        """
        made = {name: value for name, value in self.params.items() if value is not None and name not in _OURS}
        made["max_tokens"] = self.max_tokens
        if self.top_logprobs is not None:
            made |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.prefix:
            made["continue_final_message"] = True
        return made


_OURS = (
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "n",
    "model",
    "stream",
)
"""Set by the client itself for each call."""


@dataclass(frozen=True)
class Size:
    """Tokens of a prompt, and how many of them the side has in its cache."""

    prompt: int
    cached: int = 0


class AnswerSource(Protocol):
    """One side."""

    speeds: Speeds
    features: tuple[Feature, ...]

    def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece; closing it stops the work. SideError if the side fails, RequestError
        if it refuses.
        """
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


def estimate(messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any]) -> int:
    """Tokens of a prompt, guessed from its characters."""
    text = sum(len(str(message.get("content") or "")) for message in messages)
    return max((text + len(str(params.get("tools") or ""))) // CHARS_PER_TOKEN + 4 * len(messages), 1)
