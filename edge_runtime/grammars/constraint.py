"""Follows a grammar while an answer is sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import RequestError

STEP_SECONDS = 0.1
"""The most seconds of processor time for one token: meanwhile the steps of other requests wait."""


class GrammarConstraint:
    """Masks the tokens of one answer by a grammar; see engine.requests.Constraint. An error
    ends its request.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        param: str = "response_format",
        ends: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
    ) -> None:
        """`matcher`: a llguidance.LLMatcher at the start of its grammar, used by this constraint alone.

        `param`: the request's parameter with the grammar, for errors. `ends`: the tokens that end the text;
        with `ignore_eos` they are allowed only where the grammar allows nothing else.
        """
        self._matcher, self._param = matcher, param
        self.ends = frozenset(ends)
        self._held = tuple(ends) if ignore_eos else ()
        self._words = (vocab_size + 31) // 32
        self._count = 0
        self.complete_at: int | None = None
        """The number of tokens when the grammar was complete, None before; later tokens are ignored."""

    def allowed(self) -> npt.NDArray[Any]:
        """The mask of the next token, uint32 [(vocab_size+31)//32]."""
        start = time.thread_time()
        # The library's mask has room for one token more.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
        self._check(start)
        return without(words, self._held)

    def accept(self, token: int) -> bool:
        """Advance by a token; False if the grammar does not allow it."""
        start = time.thread_time()
        self._count += 1
        if self.complete_at is not None:  # a step that was in flight when the grammar ended
            return True
        taken = bool(self._matcher.consume_token(token))
        self._check(start)
        if taken and self._matcher.is_stopped():
            self.complete_at = self._count
        return taken

    def _check(self, start: float) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar cannot be followed further: {why(self._matcher.get_error())}; make it simpler",
                self._param,
            )
        if time.thread_time() - start > STEP_SECONDS:
            raise RequestError("the grammar takes too long to follow; make it simpler", self._param)


def without(allowed: npt.NDArray[np.uint32], tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    """A mask without some tokens; the same mask if it allows no others."""
    left = allowed.copy()
    for token in tokens:
        left[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
    return left if left.any() else allowed


_REASON = "error: "


def why(message: str) -> str:
    """The first line of a library's error message, at most 300 characters.

    A regex parser prints the pattern below that line, and the reason last: the reason is added.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    said = lines[0] if lines else "no reason is known"
    reason = next((line for line in lines if line.startswith(_REASON)), "")
    return (f"{said} {reason.removeprefix(_REASON)}" if said.endswith(":") and reason else said)[:300]
