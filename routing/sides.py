"""Interface of a side: how it is called, how it fails, and how fast it was."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nearfar.errors import NearfarError
from nearfar.routing.shapes import UsagePiece
from nearfar.routing.speed import Speeds
from nearfar.routing.types import Feature

CHARS_PER_TOKEN = 4
"""Characters per token, for estimates where the prompt's tokenizer is not here."""


class SideError(NearfarError):
    """A side failed; the other may do better. `code` is short, for reasons: a status, timeout, connection,
    lost, cut.

    `retry_after`: seconds that the side requested. `busy`: it works, but takes no more requests now.
    """

    def __init__(
        self, message: str, code: str, *, retry_after: float | None = None, busy: bool = False
    ) -> None:
        super().__init__(message)
        self.code, self.retry_after, self.busy = code, retry_after, busy


@dataclass(frozen=True)
class SideCall:
    """A call to a side: OpenAI's parameters, and the beginning of the answer if there is one already."""

    messages: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]
    max_tokens: int
    prefix: str = ""
    top_logprobs: int | None = None

    def after(self, text: str, tokens: int) -> SideCall:
        """Return the call that continues after `text`, the `tokens` tokens of the answer so far."""
        return replace(self, prefix=text, max_tokens=max(self.max_tokens - tokens, 1))

    @property
    def given(self) -> list[dict[str, Any]]:
        """The messages, with the beginning of the answer if there is one."""
        begun = [{"role": "assistant", "content": self.prefix}] if self.prefix else []
        return [*map(dict, self.messages), *begun]

    @property
    def body(self) -> dict[str, Any]:
        """The call's parameters other than messages: sampling, limits, and whether the last message
        continues.
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
"""Parameters that the client itself sets for each call."""


@dataclass(frozen=True)
class Size:
    """The tokens of a prompt, and how many of them the side has in its cache."""

    prompt: int
    cached: int = 0


class AnswerSource(Protocol):
    """One side."""

    speeds: Speeds
    features: tuple[Feature, ...]

    def stream(self, call: SideCall) -> AsyncGenerator[UsagePiece, None]:
        """Yield the answer piece by piece; closing it stops the work. Raises SideError if the side fails,
        RequestError if it rejects the request.
        """
        ...

    async def close(self) -> None:
        """Free the side's resources."""
        ...


def estimate(messages: tuple[Mapping[str, Any], ...], params: Mapping[str, Any]) -> int:
    """Estimate a prompt's tokens from its characters."""
    text = sum(len(str(message.get("content") or "")) for message in messages)
    return max((text + len(str(params.get("tools") or ""))) // CHARS_PER_TOKEN + 4 * len(messages), 1)
