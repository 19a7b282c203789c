"""The sampling parameters of a request, with their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nearfar.errors import CheckpointError, RequestError
from nearfar.format.requests import MAX_STOPS
from nearfar.format.sampling import NAMES, RANGES, UNSAID, Range, SamplingDefaults
from nearfar.format.sizes import TOP_LOGPROBS

MAX_TOP_LOGPROBS = TOP_LOGPROBS


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters with OpenAI's names and defaults; the command line takes its defaults from here
    too.

    `max_tokens` None: until the context is full. `seed` None: a random seed. `logprobs`: the number of
    alternatives to return in addition to the chosen token's own log probability; None: no log probabilities.
    `ignore_eos` continues past the end token (for benchmarks); with a grammar the answer ends where the
    grammar allows nothing but the end.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, values in RANGES.items():
            _number(name, getattr(self, name), values)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("top_logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _stops(self.stop)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, Range(-100.0, 100.0))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for token ids that the model does not have."""
        for token in self.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias: token id {token} is outside the vocabulary of {vocab_size} tokens",
                    "logit_bias",
                )

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.temperature == 0.0 and not self.penalized and not self.logit_bias


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The sampling defaults in a generation_config.json; UNSAID for a file without any.

    CheckpointError for a value that no request could have. `do_sample` is not read: files that set it to
    false together with a temperature mean the temperature.
    """
    given = {name: generation_config[name] for name in NAMES if generation_config.get(name) is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise CheckpointError(f"generation_config.json: {error}: correct it, or remove it") from error
    return SamplingDefaults(**given) if given else UNSAID


def _number(param: str, value: object, values: Range) -> None:
    """Raise RequestError unless `value` is a number within `values`."""
    low, high, above = values.least, values.most, values.above
    wanted = f"a number in {'(' if above else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{param} must be {wanted}, not {value!r}", param)
    if math.isnan(value) or value < low or value > high or (above and value == low):
        raise RequestError(f"{param} must be {wanted}, not {value}", param)


def _integer(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{param} must be a whole number, not {value!r}", param)
    if not low <= value <= high:
        raise RequestError(f"{param} must be at least {low} and at most {high}, not {value}", param)


def _stops(stop: object) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(item, str) for item in stop):
        raise RequestError(f"stop must be strings, not {stop!r}", "stop")
    if len(stop) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, not {len(stop)}", "stop")
    if "" in stop:
        raise RequestError("stop must not contain an empty string", "stop")
