"""Continues an answer on another replica when its replica is lost."""

from __future__ import annotations

import secrets
from dataclasses import replace

from nearfar.errors import EngineError
from nearfar.fallback_server.backend import BackendEvent, TokenRequest


class ContinuedAnswer:
    """A request and the tokens of its answer so far.

    The random counter of a token is its position, and the seed is drawn here, once. So the tokens so far can
    become the end of the prompt, and the remaining tokens are the same as without the loss. Where the next
    token depends on which tokens were generated (a grammar, presence and frequency penalties), the answer is
    computed again from its beginning and the known tokens are skipped.
    """

    def __init__(self, request: TokenRequest) -> None:
        sampling = request.sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.request = replace(
            request, sampling=replace(sampling, seed=seed, logit_bias=dict(sampling.logit_bias))
        )
        self.tokens: list[int] = []
        self._repeated: list[int] = []
        """The tokens that a replica which computes the answer again still has to repeat, in order."""
        self._attempts = 0

    @property
    def repeats(self) -> bool:
        """Whether the answer must be computed again from its beginning to continue."""
        sampling = self.request.sampling
        penalized = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        return self.request.grammar is not None or penalized

    def ask(self) -> TokenRequest:
        """Return the request for the next replica. Each attempt has its own id, since the lost one may still
        be known.
        """
        self._attempts += 1
        made = replace(self.request, id=f"{self.request.id}.{self._attempts}")
        self._repeated = list(self.tokens) if self.repeats else []
        if self._repeated or not self.tokens:
            return made
        done = len(self.tokens)
        return replace(
            made,
            tokens=made.tokens + tuple(self.tokens),
            max_tokens=made.max_tokens - done,
            min_tokens=max(made.min_tokens - done, 0),
            prompt_logprobs=None,
        )

    def take(self, event: BackendEvent) -> BackendEvent | None:
        """Return the event as the client should see it; None if the client has seen it.

        Raises EngineError if a repeated answer differs from the client's (a near tie that fell differently).
        """
        if self._repeated:
            if event.token != self._repeated.pop(0) or event.finish is not None:
                raise EngineError(
                    "the engine died, and another did not repeat the answer so far; send the request again"
                )
            return None
        first = not self.tokens
        if event.token is not None:
            self.tokens.append(event.token)
        return event if first else replace(event, cached_tokens=0, prompt_logprobs=None)
