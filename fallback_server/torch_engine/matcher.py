"""A grammar while an answer is sampled by the torch engine."""

from __future__ import annotations

import torch
import xgrammar

from nearfar.errors import RequestError


class Matcher:
    """Where an answer stands in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stops: frozenset[int], vocab: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=sorted(stops) or None, terminate_without_stop_token=not stops
        )
        self._mask = xgrammar.allocate_token_bitmask(1, vocab)

    def allowed(self) -> torch.Tensor:
        """Bitmask int32 [ceil(vocab / 32)] of the tokens that may come next."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        return self._mask[0]

    def accept(self, token: int) -> bool:
        """Step over a token; whether the answer is complete. RequestError for a token that the grammar does not allow."""
        if not self._matcher.accept_token(token):
            raise RequestError(f"the grammar does not allow token {token}, which was the only choice", "response_format")
        return bool(self._matcher.is_terminated())
