"""Checks of a request before the engine gets it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from nearfar.edge_runtime.engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from nearfar.errors import ContextError, RequestError
from nearfar.fallback_server.backend import BackendInfo, TokenRequest
from nearfar.fallback_server.torch_engine.options import TorchOptions

MAX_PRIORITY = 1_000_000


def checked(request: TokenRequest, info: BackendInfo, options: TorchOptions) -> TokenRequest:
    """Return the request with its seed drawn and stop ids outside the vocabulary left out. Raises
    RequestError for what cannot be done.

    An answer that does not fit in the context ends with "length" where the context ends.
    """
    check_tokens(request.tokens, info, room=1)
    s = request.sampling
    SamplingParams(
        max_tokens=request.max_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=s.logit_bias,
        seed=s.seed,
        logprobs=request.logprobs,
    ).check_vocabulary(info.vocab_size)
    _whole("min_tokens", request.min_tokens, 0, 2**31 - 1)
    _whole("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.prompt_logprobs is not None:
        _whole("prompt_logprobs", request.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _whole("prompt_logprobs_from", request.prompt_logprobs_from, 0, len(request.tokens) - 1)
    if request.grammar is not None and len(request.grammar.text) > options.grammar_chars:
        raise RequestError(
            f"the grammar has {len(request.grammar.text)} characters: at most {options.grammar_chars} "
            "are allowed",
            "response_format",
        )
    stops = frozenset(token for token in request.stop_token_ids if 0 <= token < info.vocab_size)
    seed = secrets.randbits(64) if s.seed is None else s.seed
    return replace(
        request, stop_token_ids=stops, sampling=replace(s, seed=seed, logit_bias=dict(s.logit_bias))
    )


def check_tokens(tokens: Sequence[int], info: BackendInfo, room: int) -> None:
    """Raise an error for an empty sequence, ids outside the vocabulary, and a sequence that leaves less than
    `room` tokens of the context.
    """
    if not tokens:
        raise RequestError("the prompt is empty: it needs at least one token", "prompt")
    if len(tokens) > info.context_length - room:
        what = "prompt" if room else "input"
        raise ContextError(len(tokens), info.context_length, what, what=what)
    for token in tokens:
        if type(token) is not int or not 0 <= token < info.vocab_size:
            raise RequestError(
                f"the prompt has token {token!r}: ids are whole numbers from 0 to {info.vocab_size - 1}",
                "prompt",
            )


def _whole(param: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{param} must be a whole number from {low} to {high}, not {value!r}", param)
