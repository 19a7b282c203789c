"""A grammar's state while an answer is sampled, by the edge runtime or the torch engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.grammars.constraint import without

log = logging.getLogger(__name__)


def follow(compiled: Any, stops: frozenset[int]) -> Any:
    """Return a matcher at the start of a compiled grammar. `stops`: the tokens that may end it, at least
    one.
    """
    import xgrammar  # already imported in a thread: the module imports PyTorch, which takes seconds

    return xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stops))


class TokenConstraint:
    """The tokens that a request may take: those that its grammar allows, and no end token before
    `min_tokens`. Where the grammar allows nothing but its end, the text ends before `min_tokens`.

    No method raises, since the engine's loop serves other requests too. For the same reason a grammar whose
    matcher takes more than STEP_SECONDS of processor time for a token ends its request; ambiguous grammars
    get slower with each token.
    """

    STEP_SECONDS = 0.1

    def __init__(
        self,
        matcher: Any | None,
        vocab_size: int,
        stops: frozenset[int],
        min_tokens: int,
        held: frozenset[int] = frozenset(),
    ) -> None:
        """`stops`: the tokens that end the text. `held`: the end tokens that are allowed only where the
        grammar allows nothing else, after any number of tokens (ignore_eos).
        """
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._stops, self._held = ([t for t in some if t < vocab_size] for some in (stops, held))
        self._min = min_tokens
        self._count = 0
        self._failed = False

    def allowed(self) -> npt.NDArray[Any]:
        """Return the mask of allowed tokens, uint32 [(vocab_size+31)//32]."""
        row = np.full((1, self._words), -1, np.int32)
        if self._matcher is not None and not self._failed:
            self._timed(lambda matcher: matcher.is_terminated() or matcher.fill_next_token_bitmask(row))
        words: npt.NDArray[np.uint32] = row.view(np.uint32)[0]
        return without(words, self._stops if self._count < self._min else self._held)

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False where the grammar does not allow it, or its matcher failed."""
        self._count += 1
        if self._matcher is None:
            return True
        taken = self._timed(lambda matcher: matcher.is_terminated() or matcher.accept_token(token))
        return taken and not self._failed

    def _timed(self, call: Callable[[Any], Any]) -> bool:
        start = time.thread_time()
        try:
            done = bool(call(self._matcher))
        except RuntimeError as error:
            log.warning("a grammar matcher failed: %s", error)
            done, self._failed = False, True
        if time.thread_time() - start > self.STEP_SECONDS:
            log.warning("a grammar takes too long to follow, and its request ends")
            self._failed = True
        return done
