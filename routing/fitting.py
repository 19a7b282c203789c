"""Fits a router to examples: prompts with what the device's model showed about them and about the first
tokens of its answers, and how well each side answered. scikit-learn is needed for fitting only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearfar.errors import RequestError
from nearfar.routing.confidence import First
from nearfar.routing.fitted import (
    ANSWER_FEATURES,
    PROMPT_FEATURES,
    FittedRouter,
    Point,
    Probe,
    Regression,
    answer_features,
    prompt_features,
)
from nearfar.routing.record_lines import RecordLine, read_lines

QUALITIES = ("device_quality", "cloud_quality")
"""The fields of an outcome: how well each side answered, from 0 (wrong) to 1 (right)."""
FOLDS, ROUNDS = 5, 5
LEAST = 40
"""The fewest examples that are fitted; with fewer, the curve says nothing."""
STRENGTH = 0.3
"""Inverse of the L2 penalty; it is small because examples are few and features are correlated."""
HELD = 8
"""Tokens of an answer that are looked at before it is shown, if the caller does not say."""
DIRECTIONS, PROBE_STRENGTH = 30, 0.03
"""Number of main directions of the last hidden row that a probe uses, and the inverse of its L2 penalty."""
STEPS = 20
"""Points of a curve after the first one."""
PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Parts of the cloud's share that may be chosen before the first token; the rest is chosen after it."""
WORTH = 0.01
"""The gain in the mean of a curve, as a part of the gap, for which answers are begun and given up."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Prices:
    """The cloud's prices per million tokens of prompts and of answers."""

    price_in: float
    price_out: float


@dataclass(frozen=True)
class Example:
    """What the device's model showed about a prompt, and the quality of each side's answer, in [0, 1].

    `first`: the first tokens of the device's answer, or none. `cost`: the cloud's price of the request; None
    if it is unknown.
    """

    knowledge: dict[str, Any]
    device: float
    cloud: float
    model: str
    artifact: str
    first: tuple[First, ...] = ()
    cost: float | None = None


@dataclass(frozen=True)
class Read:
    """The examples of a file of records, and in words the lines that gave none: `left_out`."""

    examples: tuple[Example, ...]
    left_out: tuple[str, ...]

    @property
    def enough(self) -> tuple[Example, ...]:
        """The examples. Raises RequestError if there are too few, with what was left out."""
        if len(self.examples) < LEAST:
            why = "; ".join(("", *self.left_out))
            raise RequestError(
                f"{len(self.examples)} examples have outcomes: at least {LEAST} are needed{why}", "records"
            )
        return self.examples


def read_examples(records: Path, outcomes: Path | None, prices: Prices | None = None) -> Read:
    """Read decision records with outcomes. `outcomes`: lines of {"id", "device_quality", "cloud_quality"},
    where the records do not have these fields themselves. `prices`: instead of those in the records. Raises
    RequestError with file, line, field and value for lines that are wrong.
    """
    known = {} if outcomes is None else dict(_once(read_lines(outcomes, ("id", *QUALITIES), "an outcome")))
    made, seen = [], set[str]()
    unjudged = untold = 0
    lines = list(read_lines(records, (), "a decision record"))
    for name, line in _once(lines):
        seen.add(name)
        judged = known.get(name, line)
        if all(judged.get(each) is None for each in QUALITIES):
            unjudged += 1
        elif line.get("knowledge") is None:
            untold += 1
        else:
            made.append(_example(line, judged, prices))
    if (several := len({each.artifact for each in made})) > 1:
        raise RequestError(f"{records} has records of {several} artifacts: fit each by itself", "records")
    unknown = [name for name in known if name not in seen]
    left = (
        (unjudged, f"have no outcome ({', '.join(QUALITIES)})"),
        (untold, "have no knowledge: record with Policy(router='record'); private requests have none"),
    )
    said = [f"{count} of {len(lines)} records in {records} {why}" for count, why in left if count]
    if unknown:
        said.append(
            f"{len(unknown)} of {len(known)} outcomes in {outcomes} have an id that no record has, such as "
            f"{unknown[0]!r}"
        )
    return Read(tuple(made), tuple(said))


def _once(lines: Iterable[RecordLine]) -> Iterator[tuple[str, RecordLine]]:
    """Yield each line with its id; a line without an id has a name of its own. Raises RequestError for an id
    that comes twice.
    """
    first: dict[str, int] = {}
    for line in lines:
        name = line.of_kind("id", str)
        if name in first:
            line.wrong(f"the id {name!r} is also in line {first[name]}: leave one of them out")
        if name is not None:
            first[name] = line.number
        yield name if name is not None else f"line {line.number}", line


def _example(line: RecordLine, judged: RecordLine, prices: Prices | None) -> Example:
    """Make an example of a record, and of the line that has its qualities."""
    qualities = []
    for each in QUALITIES:
        quality = judged.number_of(each, 0, 1)
        if quality is None:
            judged.wrong(f"the field {each} is missing: an outcome has {', '.join(QUALITIES)}")
        qualities.append(quality)
    line.of_kind("knowledge", dict)
    if line.get("knowledge.top") is None:
        line.wrong(
            "knowledge.top is missing: the record is damaged, or an earlier nearfar wrote it; leave the line "
            "out, or record again with Policy(router='record')"
        )
    known = {
        **line.data["knowledge"],
        "prompt_tokens": line.number_of("knowledge.prompt_tokens", 0) or 0,
        "top": line.numbers("knowledge.top"),
        "prompt_logprob": line.number_of("knowledge.prompt_logprob"),
        "sure": line.number_of("knowledge.sure"),
        "row": line.rows("knowledge.row", 2),
    }
    first = tuple((a, b) for a, b in line.rows("outcome.first_tokens", 2))
    model, artifact = line.of_kind("model", str) or "", line.of_kind("artifact", str) or ""
    return Example(known, qualities[0], qualities[1], model, artifact, first, _cost(line, prices))


def _cost(line: RecordLine, prices: Prices | None) -> float | None:
    """The price of a recorded request in the cloud, whoever answered it: the length of an answer is taken
    from the side that gave it.
    """
    prices = prices or Prices(
        line.number_of("cloud.price_in", 0) or 0, line.number_of("cloud.price_out", 0) or 0
    )
    prompt = line.number_of("outcome.prompt_tokens", 0)
    answer = line.number_of("outcome.completion_tokens", 0)
    if prompt is None or answer is None or not (prices.price_in or prices.price_out):
        return None
    return (prompt * prices.price_in + answer * prices.price_out) / 1e6


def fit(examples: Seq[Example], tokens: int = HELD, probe: bool = False) -> FittedRouter:
    """Fit a router whose threshold sends half of the prompts to the cloud. Its curve and its AUROC are
    computed from held-out scores: each example is scored by a fit to other examples. `tokens`: how many first
    tokens of an answer the router may use. `probe`: it also uses the last hidden row.
    """
    examples = Read(tuple(examples), ()).enough
    gains = np.array([each.cloud > each.device for each in examples])
    if min(gains.sum(), (~gains).sum()) < FOLDS:
        raise RequestError(
            "in almost all examples the same side is better: there is nothing to fit", "records"
        )
    prompt, early = _regression(ExampleTable.of(examples, None, probe), gains)
    begun = np.array([len(each.first) > 0 for each in examples])
    answer, late, part = None, None, 1.0
    if begun.sum() >= LEAST and min(gains[begun].sum(), (~gains[begun]).sum()) >= FOLDS:
        columns = ExampleTable.of([each for each in examples if each.first], tokens, probe)
        answer, scores = _regression(columns, gains[begun])
        late = np.full(len(examples), -1.0)  # an answer without log-probabilities is never given up
        late[begun] = scores
        part = _best_part(early, late, examples)
    if part == 1.0:
        answer, late = None, None
    curve = curve_of(early, examples, late, part)
    half = curve[STEPS // 2]
    first = examples[0]
    return FittedRouter(
        first.model, first.artifact, len(examples), prompt, half.threshold, answer, half.limit, tokens, curve
    )


@dataclass(frozen=True)
class ExampleTable:
    """What examples show: `table` [examples, names] with NaN where it is missing, and `row` [examples,
    tokens] with the log-probabilities of tokens, less their mean; no tokens: no probe.
    """

    names: tuple[str, ...]
    table: Array
    tokens: tuple[int, ...]
    row: Array

    @classmethod
    def of(cls, examples: Seq[Example], tokens: int | None, probe: bool) -> ExampleTable:
        """Make the columns of prompts, and of the first `tokens` tokens of answers. `probe`: with the
        last hidden row, which all examples must have.
        """
        rows = [prompt_features(each.knowledge) for each in examples]
        names: tuple[str, ...] = PROMPT_FEATURES
        if tokens is not None:
            later = [answer_features(each.first[:tokens]) for each in examples]
            rows = [row | more for row, more in zip(rows, later, strict=True)]
            names = (*PROMPT_FEATURES, *ANSWER_FEATURES)
        table = np.array([[_or_nan(row[name]) for name in names] for row in rows], np.float64)
        kept = [at for at in range(len(names)) if not np.isnan(table[:, at]).all()]
        shown = [each.knowledge.get("row") or () for each in examples]
        ids = tuple(int(token) for token, _ in shown[0]) if probe else ()
        if probe and (not ids or any(tuple(token for token, _ in row) != ids for row in shown)):
            raise RequestError(
                "a probe needs the last hidden row in all records: record again with "
                "Policy(router='record'), or fit without --probe",
                "probe",
            )
        values = np.array(
            [[each for _, each in row] for row in shown] if ids else np.zeros((len(examples), 0))
        )
        centred = values - values.mean(axis=1, keepdims=True) if ids else values
        return cls(tuple(names[at] for at in kept), table[:, kept], ids, centred)

    def __getitem__(self, part: Array) -> ExampleTable:
        """The columns of some examples."""
        return replace(self, table=self.table[part], row=self.row[part])

    def fit(self, gains: Array) -> Regression:
        """Logistic regression of the gains, without its AUROC. The row is replaced by its main directions."""
        from sklearn.linear_model import LogisticRegression

        mean = np.nanmean(self.table, axis=0)
        filled = np.where(np.isnan(self.table), mean, self.table)
        scale = filled.std(axis=0)
        scale[scale < 1e-9] = 1.0
        inputs, probing = (filled - mean) / scale, bool(self.tokens)
        middle = self.row.mean(axis=0)
        if probing:
            count = min(DIRECTIONS, len(gains) - 1, len(self.tokens))
            _, sizes, directions = np.linalg.svd(self.row - middle, full_matrices=False)
            spread = np.maximum(sizes[:count] / np.sqrt(len(gains)), 1e-9)
            inputs = np.hstack([inputs, (self.row - middle) @ directions[:count].T / spread])
        made = LogisticRegression(C=PROBE_STRENGTH if probing else STRENGTH, max_iter=1000).fit(inputs, gains)
        weights, rest = np.split(made.coef_[0], [len(self.names)])
        probe = None
        if probing:
            along = directions[:count].T @ (rest / spread)
            probe = Probe(self.tokens, tuple(along.tolist()), float(along @ middle))
        lists = [tuple(each.tolist()) for each in (mean, scale, weights)]
        return Regression(self.names, lists[0], lists[1], lists[2], float(made.intercept_[0]), 0.5, probe)

    def scores(self, made: Regression) -> Array:
        """The probability of each example by a regression of such columns."""
        filled = np.where(np.isnan(self.table), np.array(made.mean), self.table)
        total = made.bias + (filled - np.array(made.mean)) / np.array(made.scale) @ np.array(made.weights)
        if made.probe is not None:
            total = total + self.row @ np.array(made.probe.weights) - made.probe.mean
        return np.asarray(1 / (1 + np.exp(-np.clip(total, -500, 500))))


def held_out(columns: ExampleTable, gains: Array) -> Array:
    """The mean score of each example over several divisions, from models that were fitted to the others."""
    try:
        from sklearn.model_selection import StratifiedKFold
    except ImportError as error:
        raise RequestError("fitting needs scikit-learn: pip install 'nearfar[fit]'", "fit") from error
    scores = np.zeros(len(gains))
    for seed in range(ROUNDS):
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        for train, test in folds.split(columns.table, gains):
            scores[test] += columns[test].scores(columns[train].fit(gains[train]))
    return scores / ROUNDS


def _regression(columns: ExampleTable, gains: Array) -> tuple[Regression, Array]:
    """Fit to all examples, and give each the score of fits to others."""
    scores = held_out(columns, gains)
    from sklearn.metrics import roc_auc_score

    return replace(columns.fit(gains), auroc=float(roc_auc_score(gains, scores))), scores


def curve_of(
    early: Array, examples: Seq[Example], late: Array | None = None, part: float = 1.0
) -> tuple[Point, ...]:
    """Shares from 0 to 1 in equal steps, each with the quality if that share of the prompts, those with the
    highest scores, goes to the cloud. The fraction `part` of them is chosen by the scores before the first
    token (`early`), the rest by the scores after the first tokens (`late`).
    """
    device = np.array([each.device for each in examples])
    gain = np.array([each.cloud for each in examples]) - device
    costs = [each.cost for each in examples]
    count, order = len(examples), np.argsort(-early, kind="stable")
    made = []
    for step in range(STEPS + 1):
        sent = round(count * step / STEPS)
        whole = sent == count or late is None
        ahead = sent if whole else round(sent * part)
        gone = order[:ahead]
        limit = None
        if late is not None and sent > ahead:
            left = order[ahead:]
            given_up = left[np.argsort(-late[left], kind="stable")][: sent - ahead]
            given_up = given_up[late[given_up] >= 0]
            limit = float(late[given_up[-1]]) if len(given_up) else None
            gone = np.concatenate([gone, given_up])
        threshold = 1.0 if ahead == 0 else 0.0 if ahead == count else float(early[order[ahead - 1]])
        priced = [costs[at] for at in gone]
        money = None if None in costs else 1000 * sum(each or 0.0 for each in priced) / count
        quality = float((device.sum() + gain[gone].sum()) / count)
        made.append(Point(len(gone) / count, threshold, limit, quality, money))
    return tuple(made)


def closed_gap(curve: Seq[Point]) -> float:
    """The mean over all shares of the part of the gap in quality that is closed (APGR); random: about 0.5."""
    low, high = curve[0].quality, curve[-1].quality
    return float(np.mean([(point.quality - low) / (high - low) for point in curve])) if high != low else 0.5


def _best_part(early: Array, late: Array, examples: Seq[Example]) -> float:
    """The part of the cloud's share to choose before the first token; less than 1 only if it is worth it."""
    gaps = {part: closed_gap(curve_of(early, examples, late, part)) for part in PARTS}
    best = max(PARTS, key=lambda part: gaps[part])
    return best if gaps[best] >= gaps[1.0] + WORTH else 1.0


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
