"""How well the difficulty score decides who answers: RouteLLM's figures, on questions whose subjects it has
never seen.

    python benchmarks/routing/apgr.py [--data DIR] [--rounds N] [--seed N] [--json FILE]

Definitions, after RouteLLM (arXiv 2406.18665, section 3). The questions are sorted, hardest first, and the
first share c of them goes to the strong model. With r(c) the mean result then (1: right, 0: wrong), r(0) the
weak model's, r(1) the strong model's:

    PGR(c)  = (r(c) - r(0)) / (r(1) - r(0))              the gap that is recovered
    APGR    = integral of PGR(c) over c from 0 to 1      by trapezoids; a random order gives 0.5
    CPT(x)  = the least c with PGR(c) >= x               calls to the strong model for a performance of x

Rows: prompt length alone (characters); the score. MMLU: every subject is scored by weights trained on the
other 28. GSM8K: by weights trained on MMLU only, and by ten folds of its own questions (with MMLU). MT-Bench,
first turns: the shipped model, which has never seen it; r is the judge's mark. Intervals (95 %) are of
resampled questions with the scores as they are, and for the difference to length on MMLU also of resampled
subjects.

What is held out are weights, means and scales. The lists of features and the two ridges were chosen by
looking at all three sets, so the figures flatter a little.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Rich

from nearfar.routing.difficulty.score import MODEL, Difficulty
from nearfar.routing.difficulty.training import (
    GSM8K,
    Array,
    GradedPrompt,
    apply,
    fit_choice,
    fit_open,
    folds,
    held_out,
    read_routellm,
    tabulate,
)  # fmt: skip

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval" / "routellm"
WEAK, STRONG = "mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview"


@dataclass(frozen=True)
class Set:
    """Questions: the gain of the strong model's answers over the weak one's [n], scores [n] by row."""

    name: str
    gain: Array
    scores: dict[str, Array]
    subjects: np.ndarray | None = None


def curve(scores: Array, gain: Array) -> Array:
    """PGR at c = 0, 1/n, …, 1 [n + 1]. Equal scores keep their order in the file."""
    ordered = gain[np.argsort(-scores, kind="stable")]
    return np.concatenate([[0.0], np.cumsum(ordered)]) / gain.sum()


def apgr(scores: Array, gain: Array) -> float:
    """Give the mean height of the curve."""
    return float(np.trapezoid(curve(scores, gain), dx=1 / len(gain)))


def cpt(scores: Array, gain: Array, share: float) -> float:
    """Calls to the strong model until `share` of the gap is recovered for the first time, as a share of
    all.
    """
    return float(np.argmax(curve(scores, gain) >= share - 1e-12) / len(gain))


def resamples(group: Set, rounds: int, seed: int, *, subjects: bool = False) -> list[np.ndarray]:
    """Row numbers of `rounds` samples with replacement: of questions, or of whole subjects."""
    random = np.random.default_rng(seed)
    if not subjects or group.subjects is None:
        return [random.integers(0, len(group.gain), len(group.gain)) for _ in range(rounds)]
    rows = [np.flatnonzero(group.subjects == name) for name in np.unique(group.subjects)]
    return [
        np.concatenate([rows[at] for at in random.integers(0, len(rows), len(rows))]) for _ in range(rounds)
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """The middle 95 %."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def report(group: Set, rounds: int, seed: int) -> list[dict[str, object]]:
    """A record a row of the table."""
    samples, found = resamples(group, rounds, seed), []
    length = group.scores["length"]
    for name, scores in group.scores.items():
        measures: dict[str, Callable[[Array, Array], float]] = {
            "apgr": apgr, "cpt50": lambda s, g: cpt(s, g, 0.5), "cpt80": lambda s, g: cpt(s, g, 0.8),
        }  # fmt: skip
        row: dict[str, object] = {"set": group.name, "by": name, "questions": len(scores)}
        for key, measure in measures.items():
            row[key] = measure(scores, group.gain)
            row[f"{key}_95"] = interval([measure(scores[rows], group.gain[rows]) for rows in samples])
        if name != "length":
            differ = lambda rows: apgr(scores[rows], group.gain[rows]) - apgr(length[rows], group.gain[rows])  # noqa: B023, E731
            row["over_length"] = apgr(scores, group.gain) - apgr(length, group.gain)
            row["over_length_95"] = interval([differ(rows) for rows in samples])
            if group.subjects is not None:
                by_subject = resamples(group, rounds, seed, subjects=True)
                row["over_length_95_subjects"] = interval([differ(rows) for rows in by_subject])
        found.append(row)
    return found


def lengths(examples: list[GradedPrompt]) -> Array:
    """Characters of each prompt."""
    return np.array([len(example.prompt) for example in examples], dtype=float)


def gains(examples: list[GradedPrompt]) -> Array:
    """The gain of each question: 1 if only the strong model is right, -1 if only the weak one is, else 0."""
    return np.array([float(example.strong) - float(example.weak) for example in examples])


def mmlu(examples: list[GradedPrompt], categories: dict[str, str]) -> Set:
    """Score every MMLU subject with weights that were trained on the others."""
    own = [example for example in examples if example.subject != GSM8K]
    table = tabulate(own, categories, options=True)
    scores = held_out(table, folds(table.subjects, len(np.unique(table.subjects)), 0), fit_choice)
    return Set("MMLU, unseen subjects", gains(own), {"length": lengths(own), "score": scores}, table.subjects)


def gsm8k(examples: list[GradedPrompt], categories: dict[str, str], seed: int) -> Set:
    """Score GSM8K with weights from MMLU alone, and with weights that include its own other questions."""
    table = tabulate(examples, categories, options=False)
    own = table.subjects == GSM8K
    unseen = apply(fit_open(table.take(~own)), table.take(own))
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(own))
    masks = [np.isin(np.arange(len(own)), rows[at::10]) for at in range(10)]
    inside = held_out(table, masks, fit_open)[own]
    asked = [example for example in examples if example.subject == GSM8K]
    scores = {
        "length": lengths(asked),
        "score, trained without GSM8K": unseen,
        "score, in-domain folds": inside,
    }
    return Set("GSM8K", gains(asked), scores)


def mt_bench(data: Path, model: Difficulty) -> Set:
    """First turns; what the strong model gains is the difference of the judge's marks (1 to 10)."""
    questions = [
        json.loads(line) for line in (data / "mt_bench" / "question.jsonl").read_text("utf-8").splitlines()
    ]
    marks: dict[int, dict[str, float]] = defaultdict(dict)
    for line in (data / "mt_bench" / "judgements.jsonl").read_text("utf-8").splitlines():
        mark = json.loads(line)
        if mark["turn"] == 1:
            marks[mark["question_id"]][mark["model"]] = mark["score"]
    prompts = [question["turns"][0] for question in questions]
    gain = [
        marks[question["question_id"]][STRONG] - marks[question["question_id"]][WEAK]
        for question in questions
    ]
    scores = {
        "length": [len(prompt) for prompt in prompts],
        "score": [model.probability(prompt) for prompt in prompts],
    }
    arrays = {name: np.array(values, dtype=float) for name, values in scores.items()}
    return Set("MT-Bench, first turns", np.array(gain, dtype=float), arrays)


def cell(row: dict[str, Any], key: str, sign: str = "") -> str:
    """A figure and its interval."""
    low, high = row[f"{key}_95"]
    return f"{row[key]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def show(rows: list[dict[str, object]]) -> None:
    """The table on the terminal."""
    table = Rich(title="who answers: share of calls to the strong model; 95 % intervals")
    for heading in ("set", "n", "by", "APGR", "CPT(50 %)", "CPT(80 %)", "APGR over length"):
        table.add_column(heading)
    for row in rows:
        cells = [cell(row, key) for key in ("apgr", "cpt50", "cpt80")]
        over = cell(row, "over_length", "+") if "over_length" in row else ""
        table.add_row(str(row["set"]), str(row["questions"]), str(row["by"]), *cells, over)
    Console(width=180).print(table)


def main() -> None:
    """Measure, show, and write --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rounds", type=int, default=1000, help="bootstrap samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    examples = read_routellm(options.data)
    categories = json.loads(MODEL.read_text(encoding="utf-8"))["categories"]
    sets = [
        mmlu(examples, categories),
        gsm8k(examples, categories, options.seed),
        mt_bench(options.data, Difficulty.load()),
    ]
    rows = [row for group in sets for row in report(group, options.rounds, options.seed)]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
