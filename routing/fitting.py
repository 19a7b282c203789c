"""Fits a router to examples: prompts with what the device's model showed about them, and how well each side
answered. scikit-learn is needed for fitting only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import RequestError
from nearfar.routing.fitted import FEATURES, FittedRouter, Point, feature

FOLDS, ROUNDS = 5, 5
LEAST = 40
"""The fewest examples that are fitted; with fewer, the curve says nothing."""
STRENGTH = 0.3
"""Inverse of the L2 penalty: few examples, correlated features."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Example:
    """What the device's model showed about a prompt, and the quality of each side's answer, in [0, 1]."""

    knowledge: dict[str, Any]
    device: float
    cloud: float
    model: str
    artifact: str


def read_examples(records: Path, outcomes: Path | None) -> list[Example]:
    """Read decision records with outcomes. `outcomes`: lines of {"id", "device_quality", "cloud_quality"},
    where the records do not have these fields themselves. Raises RequestError for other lines.
    """
    known = {} if outcomes is None else {line["id"]: line for line in _lines(outcomes, ("id",))}
    made, artifacts = [], set()
    for line in _lines(records, ()):
        line = {**line, **known.get(line.get("id"), {})}
        if (
            line.get("knowledge") is None
            or line.get("device_quality") is None
            or line.get("cloud_quality") is None
        ):
            continue
        told = line["knowledge"]
        qualities = [float(line[name]) for name in ("device_quality", "cloud_quality")]
        if not all(0 <= each <= 1 for each in qualities):
            raise RequestError(f"{records}: a quality must be from 0 to 1, not {qualities}", "records")
        artifacts.add(line.get("artifact", ""))
        made.append(
            Example(told, qualities[0], qualities[1], line.get("model", ""), line.get("artifact", ""))
        )
    if len(artifacts) > 1:
        raise RequestError(
            f"{records} has records of {len(artifacts)} artifacts: fit each by itself", "records"
        )
    return made


def _lines(path: Path, needed: Seq[str]) -> list[dict[str, Any]]:
    made = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or any(name not in line for name in needed):
                raise ValueError(f"it is not an object with {', '.join(needed) or 'fields'}")
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}", "records") from error
        made.append(line)
    return made


def fit(examples: Seq[Example], features: Seq[str] = FEATURES) -> FittedRouter:
    """Fit a router. Its curve and its AUROC are of scores that each example got from a fit to others."""
    if len(examples) < LEAST:
        raise RequestError(f"{len(examples)} examples have outcomes: at least {LEAST} are needed", "records")
    gains = np.array([each.cloud > each.device for each in examples])
    if min(gains.sum(), (~gains).sum()) < FOLDS:
        raise RequestError(
            "in almost all examples the same side is better: there is nothing to fit", "records"
        )
    table = np.array(
        [[_or_nan(feature(each.knowledge, name)) for name in features] for each in examples], np.float64
    )
    kept = [at for at in range(len(features)) if not np.isnan(table[:, at]).all()]
    table, names = table[:, kept], tuple(features[at] for at in kept)
    held = held_out(table, gains)
    mean, scale, weights, bias = model(table, gains)
    from sklearn.metrics import roc_auc_score

    return FittedRouter(
        examples[0].model,
        examples[0].artifact,
        names,
        tuple(mean.tolist()),
        tuple(scale.tolist()),
        tuple(weights.tolist()),
        bias,
        0.5,
        len(examples),
        float(roc_auc_score(gains, held)),
        curve_of(held, [each.device for each in examples], [each.cloud for each in examples]),
    )


def held_out(table: Array, gains: Array) -> Array:
    """The mean score of each example over several divisions, from models that were fitted to the others."""
    try:
        from sklearn.model_selection import StratifiedKFold
    except ImportError as error:
        raise RequestError("fitting needs scikit-learn: pip install 'nearfar[fit]'", "fit") from error
    scores = np.zeros(len(gains))
    for seed in range(ROUNDS):
        for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(table, gains):
            mean, scale, weights, bias = model(table[train], gains[train])
            filled = np.where(np.isnan(table[test]), mean, table[test])
            scores[test] += 1 / (1 + np.exp(-(bias + ((filled - mean) / scale) @ weights)))
    return scores / ROUNDS


def curve_of(scores: Array, device: Seq[float], cloud: Seq[float]) -> tuple[Point, ...]:
    """Shares from 0 to 1 in steps of 0.05, with the quality if the prompts with the highest scores go."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    gain = np.cumsum(np.array(cloud)[order] - np.array(device)[order])
    count, made = len(scores), []
    for step in range(21):
        sent = round(count * step / 20)
        threshold = 1.0 if sent == 0 else 0.0 if sent == count else float(ranked[sent - 1])
        quality = (sum(device) + (gain[sent - 1] if sent else 0.0)) / count
        made.append(Point(sent / count, threshold, float(quality)))
    return tuple(made)


def model(table: Array, gains: Array) -> tuple[Array, Array, Array, float]:
    """Mean, scale, weights and bias of logistic regression; a missing feature (NaN) counts as its mean."""
    from sklearn.linear_model import LogisticRegression

    mean = np.nanmean(table, axis=0)
    filled = np.where(np.isnan(table), mean, table)
    scale = filled.std(axis=0)
    scale[scale < 1e-9] = 1.0
    fitted = LogisticRegression(C=STRENGTH, max_iter=1000).fit((filled - mean) / scale, gains)
    return mean, scale, fitted.coef_[0], float(fitted.intercept_[0])


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
