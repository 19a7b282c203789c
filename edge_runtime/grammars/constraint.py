"""A grammar while an answer is sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import RequestError

STEP_SECONDS = 0.1
"""Seconds of processor time that a token may take: whatever a grammar does, other requests' steps wait for
it.
"""


class GrammarConstraint:
    """Which tokens an answer may take; see engine.requests.Constraint. It raises what ends its request."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        param: str = "response_format",
        ends: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
    ) -> None:
        """`matcher`: a llguidance.LLMatcher at the start of its grammar, this one's alone. `param`: of the
        request, that asks for it. `ends`: the tokens that end the text; with `ignore_eos` they may come only
        where the grammar allows nothing else.
        """
        self._matcher, self._param = matcher, param
        self.ends = frozenset(ends)
        self._held = tuple(ends) if ignore_eos else ()
        self._words = (vocab_size + 31) // 32
        self._count = 0
        self.complete_at: int | None = None
        """How many tokens had come when the grammar was at its end; it takes no more."""

    def allowed(self) -> npt.NDArray[Any]:
        """uint32 [(vocab_size+31)//32]."""
        start = time.thread_time()
        # The library has room for one token more.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
        self._check(start)
        return without(words, self._held)

    def accept(self, token: int) -> bool:
        """Move on by a token."""
        start = time.thread_time()
        self._count += 1
        if self.complete_at is not None:  # a step that was under way when the grammar ended
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
    """A mask of allowed tokens without some of them; as it is where it allows no others."""
    left = allowed.copy()
    for token in tokens:
        left[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
    return left if left.any() else allowed


_REASON = "error: "


def why(message: str) -> str:
    """The first line of what the library says, at most 300 characters. A regex parser draws the pattern below
    that line, and gives its reason last: the reason is added.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("<")]
    said = lines[0] if lines else "no reason is known"
    reason = next((line for line in lines if line.startswith(_REASON)), "")
    return (f"{said} {reason.removeprefix(_REASON)}" if said.endswith(":") and reason else said)[:300]
