"""A router that was fitted to outcomes: a small JSON model of what the device's model shows about a prompt,
and about the first tokens of its answer.

It says how likely the cloud is to answer better than this device's model, and from which probability on a
prompt goes there. `nearfar route fit` makes the file (fitting.py); this file needs nothing but Python. The
TypeScript version is the same; both pass the shared vectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from nearfar.errors import RequestError
from nearfar.routing.confidence import FIRST_TOKENS, First, entropy
from nearfar.routing.types import Reason

FORMAT, VERSION = "nearfar-router", 2
PROMPT_FEATURES = ("length", "entropy", "best", "margin", "prompt_logprob", "sure")
"""What a router may look at before the first token; docs/routing.md explains them."""
ANSWER_FEATURES = ("mean_logprob", "lowest_logprob", "mean_entropy", "highest_entropy")
"""What a router may look at in addition when the first tokens have come."""

Made = TypeVar("Made")


ROW_TOKENS = 128
"""Tokens whose log-probabilities show the last hidden row."""


@dataclass(frozen=True)
class Probe:
    """A direction of the last hidden row, through the output matrix: the sum of `weights` times the
    log-probabilities of `tokens`, less their mean. `mean` is the sum's mean over the examples.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    mean: float

    def value(self, row: Seq[Seq[float]]) -> float:
        """The probe's term in a regression; 0 where the row of a Knowledge lacks one of its tokens."""
        known = {int(token): logprob for token, logprob in row}
        if not known.keys() >= set(self.tokens):
            return 0.0
        shown = [known[token] for token in self.tokens]
        middle = sum(shown) / len(shown)
        products = (weight * (each - middle) for weight, each in zip(self.weights, shown, strict=True))
        return sum(products) - self.mean


@dataclass(frozen=True)
class Regression:
    """Logistic regression: bias + Σ weights · (features − mean) / scale + probe. A missing feature counts as
    its mean.

    `auroc`: measured on examples that were held out in turns.
    """

    features: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    auroc: float
    probe: Probe | None

    def probability(self, values: Mapping[str, float | None], row: Seq[Seq[float]]) -> float:
        """The probability that the cloud answers better."""
        total = self.bias + (0.0 if self.probe is None else self.probe.value(row))
        for name, mean, scale, weight in zip(self.features, self.mean, self.scale, self.weights, strict=True):
            value = values.get(name)
            total += 0.0 if value is None else weight * (value - mean) / scale
        return 1 / (1 + math.exp(-min(max(total, -500.0), 500.0)))


@dataclass(frozen=True)
class Point:
    """A point of the curve, from held-out examples: the quality, in the outcomes' unit, when `share` of the
    prompts go to the cloud.

    These are prompts whose probability is at least `threshold`, and answers whose probability after the first
    tokens is at least `limit`; None: no answer is given up. `money`: the cloud's price of a thousand
    requests; None without prices.
    """

    share: float
    threshold: float
    limit: float | None
    quality: float
    money: float | None


@dataclass(frozen=True)
class FittedRouter:
    """A router for the model of one artifact.

    `artifact`: the checkpoint's SHA-256 and the quantization scheme. `prompt` decides before the first token,
    from `threshold` on for the cloud. `answer` decides when `tokens` tokens of the device's answer have come,
    from `limit` on for the cloud; both None if that did not help.
    """

    model: str
    artifact: str
    examples: int
    prompt: Regression
    threshold: float
    answer: Regression | None
    limit: float | None
    tokens: int
    curve: tuple[Point, ...]

    @property
    def asks(self) -> bool:
        """Whether the model itself must be asked whether it can answer."""
        return any("sure" in each.features for each in (self.prompt, self.answer) if each is not None)

    @property
    def row_tokens(self) -> tuple[int, ...]:
        """Tokens whose log-probabilities it needs, for the last hidden row."""
        parts = (self.prompt, self.answer)
        probes = [part.probe for part in parts if part is not None and part.probe is not None]
        return tuple(dict.fromkeys(token for probe in probes for token in probe.tokens))

    def gain(self, knowledge: Mapping[str, Any]) -> float:
        """The probability that the cloud answers better, from a Knowledge as a dictionary."""
        return self.prompt.probability(prompt_features(knowledge), knowledge.get("row", ()))

    def doubt(self, knowledge: Mapping[str, Any], first: Seq[First], ended: bool) -> Reason | None:
        """Why the cloud should answer instead, when the device's answer began with these tokens; None: it
        should not. It is judged once, at the last of the `tokens` first tokens, or where it `ended` earlier.
        """
        due = 0 < len(first) < self.tokens if ended else len(first) == self.tokens
        if self.answer is None or self.limit is None or not due:
            return None
        values = {**prompt_features(knowledge), **answer_features(first)}
        found = self.answer.probability(values, knowledge.get("row", ()))
        return Reason("doubtful", "device", found, self.limit) if found >= self.limit else None

    def check(self, artifact: str, model: str) -> None:
        """Raise RequestError if the router was fitted to another artifact."""
        if artifact != self.artifact:
            raise RequestError(
                f"the router was fitted to {_named(self.model, self.artifact)}, but the device runs "
                f"{_named(model, artifact)}: fit a router to this model with nearfar route fit",
                "router",
            )

    def save(self, path: Path) -> None:
        """Write the router as JSON."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedRouter:
        """Read a router. Raises RequestError for any other file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RequestError(
                f"{path} is not a router ({error}): make one with nearfar route fit", "router"
            ) from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: object, name: str = "this object") -> FittedRouter:
        """Read the JSON form. `name`: what messages call it. Raises RequestError for another form."""
        try:
            given = _fields(data, ("format", "version"), cls, "it")
            if given.pop("format") != FORMAT or given.pop("version") != VERSION:
                raise ValueError(f"it has not the format {FORMAT!r} of version {VERSION}")
            answer, curve = given["answer"], given["curve"]
            if not isinstance(curve, list) or not curve:
                raise ValueError("its curve must be a list of points")
            given["prompt"] = _regression(given["prompt"], "prompt", PROMPT_FEATURES)
            both = (*PROMPT_FEATURES, *ANSWER_FEATURES)
            given["answer"] = None if answer is None else _regression(answer, "answer", both)
            given["curve"] = tuple(Point(**_fields(each, (), Point, "a point")) for each in curve)
            made = cls(**given)
            _check(made)
        except ValueError as error:
            raise RequestError(
                f"{name} is not a router: {error}; make one with nearfar route fit", "router"
            ) from error
        return made


@dataclass(frozen=True)
class Judge:
    """A router's judge of the first tokens of one answer."""

    router: FittedRouter
    knowledge: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """How many tokens it judges."""
        return self.router.tokens

    def __call__(self, first: Seq[First], ended: bool) -> Reason | None:
        """See FittedRouter.doubt."""
        return self.router.doubt(self.knowledge, first, ended)


def row_tokens(vocab_size: int) -> tuple[int, ...]:
    """The tokens whose log-probabilities are recorded for a probe: evenly spaced in the vocabulary."""
    return tuple(range(0, vocab_size, max(vocab_size // ROW_TOKENS, 1)))[:ROW_TOKENS]


def prompt_features(knowledge: Mapping[str, Any]) -> dict[str, float | None]:
    """The PROMPT_FEATURES of a Knowledge; None where the model does not show it."""
    top = knowledge["top"]
    return {
        "length": math.log(max(knowledge["prompt_tokens"], 1)),
        "entropy": entropy(top),
        "best": top[0] if top else None,
        "margin": top[0] - top[1] if len(top) > 1 else None,
        "prompt_logprob": knowledge.get("prompt_logprob"),
        "sure": knowledge.get("sure"),
    }


def answer_features(first: Seq[First]) -> dict[str, float | None]:
    """The ANSWER_FEATURES of the first tokens of an answer; None where there are none."""
    if not first:
        return dict.fromkeys(ANSWER_FEATURES)
    logprobs, entropies = [each[0] for each in first], [each[1] for each in first]
    return {
        "mean_logprob": sum(logprobs) / len(logprobs),
        "lowest_logprob": min(logprobs),
        "mean_entropy": sum(entropies) / len(entropies),
        "highest_entropy": max(entropies),
    }


def _named(model: str, artifact: str) -> str:
    checkpoint, _, scheme = artifact.partition("/")
    return f"{model or 'a model'} (checkpoint {checkpoint[:12] or 'unknown'}, {scheme or 'unknown scheme'})"


def _fields(data: object, more: Seq[str], of: type, what: str) -> dict[str, Any]:
    names = {*more, *(each.name for each in fields(of))}
    if not isinstance(data, dict) or data.keys() != names:
        given = set(data) if isinstance(data, dict) else set()
        wrong = ", ".join(sorted(map(str, names ^ given)))
        raise ValueError(f"{what} must be an object with exactly its fields (missing or unknown: {wrong})")
    return dict(data)


def _regression(data: object, what: str, known: Seq[str]) -> Regression:
    given = _fields(data, (), Regression, what)
    lists = [given[name] for name in ("features", "mean", "scale", "weights")]
    if not all(isinstance(each, list) and len(each) == len(lists[0]) for each in lists):
        raise ValueError(f"{what}: features, mean, scale and weights must be lists of one length")
    if unknown := [each for each in lists[0] if each not in known]:
        raise ValueError(f"{what} looks at {unknown[0]!r}, which this version does not know")
    if not all(map(_is_number, [*lists[1], *lists[2], *lists[3], given["bias"], given["auroc"]])):
        raise ValueError(f"{what}: not all its numbers are finite")
    if min(lists[2], default=1) <= 0:
        raise ValueError(f"{what}: a scale must be positive")
    for name in ("features", "mean", "scale", "weights"):
        given[name] = tuple(given[name])
    if given["probe"] is not None:
        given["probe"] = _probe(given["probe"])
    return Regression(**given)


def _probe(data: object) -> Probe:
    given = _fields(data, (), Probe, "a probe")
    tokens, weights = given["tokens"], given["weights"]
    if not isinstance(tokens, list) or not isinstance(weights, list) or len(tokens) != len(weights):
        raise ValueError("a probe must have as many weights as tokens")
    whole = all(type(each) is int and each >= 0 for each in tokens) and len(set(tokens)) == len(tokens)
    if not tokens or not whole or not all(map(_is_number, [*weights, given["mean"]])):
        raise ValueError("a probe must have ids of different tokens and finite numbers")
    return Probe(tuple(tokens), tuple(weights), given["mean"])


def _check(made: FittedRouter) -> None:
    if not isinstance(made.model, str) or not isinstance(made.artifact, str):
        raise ValueError("model and artifact must be texts")
    if not _is_number(made.threshold) or not (made.limit is None or _is_number(made.limit)):
        raise ValueError("threshold and limit must be numbers")
    if type(made.tokens) is not int or not 1 <= made.tokens <= FIRST_TOKENS:
        raise ValueError(f"tokens must be from 1 to {FIRST_TOKENS}")
    if made.limit is not None and made.answer is None:
        raise ValueError("it has a limit, but no answer")
    for point in made.curve:
        if not all(map(_is_number, (point.share, point.threshold, point.quality))) or not all(
            each is None or _is_number(each) for each in (point.limit, point.money)
        ):
            raise ValueError("a point must have numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
