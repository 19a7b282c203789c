"""How an answer goes on elsewhere when the replica that gave it is lost."""

from __future__ import annotations

import secrets
from dataclasses import replace

from nearfar.errors import EngineError
from nearfar.fallback_server.backend import TokenEvent, TokenRequest


class Answer:
    """A request and the tokens of its answer so far.

    The random counter of a token is its position and the seed is drawn here, once. So the tokens so far can
    become the end of the prompt, and the rest comes as it would have come. Where the next token depends on
    which tokens were generated (a grammar, presence and frequency penalties), the answer is computed again
    from its beginning and what is known of it is left out.
    """

    def __init__(self, request: TokenRequest) -> None:
        sampling = request.sampling
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.request = replace(
            request, sampling=replace(sampling, seed=seed, logit_bias=dict(sampling.logit_bias))
        )
        self.tokens: list[int] = []
        self._repeated: list[int] = []
        """What a replica that computes the answer again still has to repeat, in order."""
        self._attempts = 0

    @property
    def repeats(self) -> bool:
        """Whether going on means to compute the answer again."""
        sampling = self.request.sampling
        penalized = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        return self.request.grammar is not None or penalized

    def ask(self) -> TokenRequest:
        """What to ask of the next replica. Each attempt has an id of its own: the lost one may still be
        known.
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

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """The event as the client should see it; None if it has seen it.

        Raises EngineError if a repeated answer differs from what the client has (a near tie that fell
        differently).
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
