"""Trains the difficulty model. It needs only NumPy, and equal data give an equal model.

The model must work for subjects that it never saw. So every subject's prompts are compared among themselves
only: features and labels are taken relative to their means in the subject (fixed effects), which keeps "this
subject is hard" out of the weights, and a strong ridge keeps the weights small.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import NearfarError
from nearfar.routing.difficulty.features import features, parts
from nearfar.routing.difficulty.score import CLIP, FORMAT, LinearHead, lexicon_of

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

GSM8K = "gsm8k"

OPEN = (
    "stem_chars", "stem_sentences", "stem_sentence_words", "stem_distinct", "stem_commas",
    "has_number", "has_operator", "has_code", "has_parenthesis", "has_quote",
    "has_quantity", "has_comparison", "has_math", "has_logic", "has_computing",
)  # fmt: skip
"""Features of a prompt without options: the amount of work, and kinds of work that are not a subject's own
vocabulary.
"""

RIDGE = {"open": 3000.0, "choice": 30000.0}
KNOTS = 21


@dataclass(frozen=True)
class GradedPrompt:
    """A prompt of one subject, and whether the weak and the strong model answered it correctly."""

    subject: str
    prompt: str
    weak: bool
    strong: bool


@dataclass(frozen=True)
class Table:
    """Features [examples, features] by name, and labels 0 or 1 [examples]. `failed`: the weak model failed.
    `won`: the weak model failed and the strong one did not.
    """

    names: tuple[str, ...]
    values: Array
    subjects: npt.NDArray[np.str_]
    failed: Array
    won: Array

    def columns(self, names: Sequence[str]) -> Array:
        """Return the named features [examples, names]."""
        return self.values[:, [self.names.index(name) for name in names]]

    def take(self, rows: Mask) -> Table:
        """Return the examples of a mask."""
        return Table(self.names, self.values[rows], self.subjects[rows], self.failed[rows], self.won[rows])


def read_routellm(folder: Path) -> list[GradedPrompt]:
    """Read RouteLLM's correctness tables: gsm8k/gsm8k_responses.csv and mmlu/responses/mmlu_<subject>.csv."""
    files = sorted(folder.glob("mmlu/responses/mmlu_*.csv"))
    named = [(file.stem.removeprefix("mmlu_"), file) for file in files]
    named += [(GSM8K, file) for file in folder.glob("gsm8k/gsm8k_responses.csv")]
    if len(named) < 2:
        raise NearfarError(
            f"{folder} holds no gsm8k/gsm8k_responses.csv or mmlu/responses/mmlu_*.csv: name RouteLLM's data"
        )
    found = []
    csv.field_size_limit(1 << 24)
    for subject, path in named:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = csv.reader(lines)
            next(rows)
            found += [GradedPrompt(subject, row[0], row[1] == "True", row[2] == "True") for row in rows]
    return found


def tabulate(examples: Sequence[GradedPrompt], categories: dict[str, str], *, options: bool) -> Table:
    """Compute the features of every example, in order. `options=False` drops the options, as if the question
    were open.
    """
    lexicon, names = lexicon_of(categories), tuple(categories)
    prompts = [example.prompt if options else parts(example.prompt).stem for example in examples]
    found = [features(prompt, names, lexicon)[1] for prompt in prompts]
    every = tuple(dict.fromkeys(name for some in found for name in some))
    values = np.array([[some.get(name, 0.0) for name in every] for some in found])
    failed = np.array([not example.weak for example in examples], dtype=float)
    strong = np.array([example.strong for example in examples], dtype=float)
    return Table(every, values, np.array([example.subject for example in examples]), failed, failed * strong)


def choice_features(table: Table) -> tuple[str, ...]:
    """Names of the features for multiple-choice prompts, without shares of categories and features that
    repeat others.
    """
    repeated = ("has_", "share_")
    dropped = {"single_letters", "statements", "stem_commas", "stem_distinct"}
    return tuple(name for name in table.names if not name.startswith(repeated) and name not in dropped)


def within(values: Array, subjects: npt.NDArray[np.str_]) -> Array:
    """Subtract from each row the mean of its subject."""
    _, at = np.unique(subjects, return_inverse=True)
    sums = np.zeros((at.max() + 1, *values.shape[1:]))
    np.add.at(sums, at, values)
    means = sums / np.bincount(at).reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(values - means[at])


def fit_head(table: Table, names: Sequence[str], target: Array, ridge: float) -> LinearHead:
    """Fit a ridge regression within subjects; `train` sets the probability's curve."""
    raw = table.columns(names)
    mean, scale = raw.mean(axis=0), raw.std(axis=0)
    used = scale > 1e-6
    scale = np.where(used, scale, 1.0)
    x = within(np.clip((raw - mean) / scale, -CLIP, CLIP) * used, table.subjects)
    weights = np.linalg.solve(x.T @ x + ridge * np.eye(len(names)), x.T @ within(target, table.subjects))
    kept = tuple(name for name, some in zip(names, used, strict=True) if some)
    return LinearHead(kept, _rounded(mean[used]), _rounded(scale[used]), _rounded(weights[used]), 1.0, 0.0)


def _rounded(values: Array) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)


def fit_open(table: Table) -> LinearHead:
    """Fit the head for open prompts. Its label is that the weak model fails, which has far less noise than
    which model wins.
    """
    return fit_head(table, OPEN, table.failed, RIDGE["open"])


def fit_choice(table: Table) -> LinearHead:
    """Fit the head for multiple choice. Its label is "the strong one wins" plus half of "the weak one
    fails".
    """
    return fit_head(table, choice_features(table), table.won + 0.5 * table.failed, RIDGE["choice"])


def apply(head: LinearHead, table: Table) -> Array:
    """Return the linear scores [examples]."""
    x = (table.columns(head.features) - np.array(head.mean)) / np.array(head.scale)
    return np.asarray(np.clip(x, -CLIP, CLIP) @ np.array(head.weights))


def folds(subjects: npt.NDArray[np.str_], count: int, seed: int) -> list[Mask]:
    """Return the mask of each fold's examples: whole subjects, shuffled by the seed."""
    order = np.random.default_rng(seed).permutation(np.unique(subjects))
    return [np.isin(subjects, order[at::count]) for at in range(count)]


def held_out(table: Table, masks: Sequence[Mask], fit: Any) -> Array:
    """Return the linear score of every example, by a head that was trained without its fold."""
    scores = np.zeros(len(table.won))
    for mask in masks:
        scores[mask] = apply(fit(table.take(~mask)), table.take(mask))
    return scores


def logistic(scores: Array, labels: Array, weights: Array) -> tuple[float, float]:
    """Return slope and intercept of the logistic curve of greatest weighted likelihood (Platt), by Newton's
    method.
    """
    x = np.stack([scores, np.ones_like(scores)], axis=1)
    w = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        gradient = x.T @ (weights * (labels - p)) - 1e-6 * w
        step = np.linalg.solve((x * (weights * p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(2), gradient)
        w += step
        if np.abs(step).max() < 1e-10:
            break
    return float(w[0]), float(w[1])


def train(examples: Sequence[GradedPrompt], categories: dict[str, str], *, seed: int = 0) -> dict[str, Any]:
    """Train on all examples; the scores of held-out subjects set the curves and the knots. Returns the data
    of model.json.
    """
    chosen = tabulate([example for example in examples if example.subject != GSM8K], categories, options=True)
    opened = tabulate(examples, categories, options=False)
    heads, ranked = {}, []
    for name, table, fit in (("open", opened, fit_open), ("choice", chosen, fit_choice)):
        scores = held_out(table, folds(table.subjects, 10, seed), fit)
        weights = balance(table.subjects)
        slope, intercept = logistic(scores, table.won, weights)
        head = asdict(fit(table)) | {"slope": float(f"{slope:.6g}"), "intercept": float(f"{intercept:.6g}")}
        heads[name] = head
        probabilities = 1 / (1 + np.exp(-(head["slope"] * scores + head["intercept"])))
        ranked.append((probabilities, weights / weights.sum()))
    values, weights = (np.concatenate(some) for some in zip(*ranked, strict=True))
    return {"format": FORMAT, "categories": categories, "heads": heads, "knots": knots(values, weights)}


def balance(subjects: npt.NDArray[np.str_]) -> Array:
    """Return weights [examples] under which GSM8K counts as much as all of MMLU."""
    gsm8k = subjects == GSM8K
    return np.asarray(np.where(gsm8k, 0.5 / max(1, gsm8k.sum()), 0.5 / max(1, (~gsm8k).sum())))


def knots(values: Array, weights: Array) -> list[float]:
    """Return KNOTS weighted quantiles, strictly rising. Raises NearfarError where they are not."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    found = np.interp(np.linspace(0, 1, KNOTS), share, values[order])
    rounded = [float(f"{value:.6g}") for value in found]
    if any(a >= b for a, b in pairwise(rounded)):
        raise NearfarError(f"the reference prompts do not spread the scores: {rounded}")
    return rounded


def dump(model: dict[str, Any]) -> str:
    """Write a model as JSON with one line per list, so that changes are readable."""
    lines = json.dumps(model, ensure_ascii=False, separators=(",", ":"))
    return lines.replace(',"', ',\n"').replace('"weights":', ' "weights":') + "\n"
