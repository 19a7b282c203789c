"""Facts of facts.json: each a group of questions with one answer, or a table whose every row answers forms.

    {"kind": "nearfar", "questions": ["What is nearfar?", …], "answer": "…", "right": ["device"]}
    {"kind": "facts", "forms": ["Capital of {0}?", …], "answer": "…{1}…", "rows": [["France", "Paris"], …]}

`right` are the words that an answer must have; of a table it is the row's last word.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sample.ask import Ask, says, varied

FILE = Path(__file__).with_name("facts.json")


def read() -> list[dict[str, Any]]:
    """The groups of facts.json."""
    groups: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return groups


def every(groups: list[dict[str, Any]]) -> list[Ask]:
    """Every question, exactly as in the file."""
    asks = []
    for group in groups:
        if "rows" not in group:
            judge = says(*group["right"])
            asks += [Ask(group["kind"], each, group["answer"], judge) for each in group["questions"]]
            continue
        for row in group["rows"]:
            answer, judge = group["answer"].format(*row), says(row[-1])
            asks += [Ask(group["kind"], form.format(*row), answer, judge) for form in group["forms"]]
    return asks


def asks(rng: random.Random, kind: str, pool: list[Ask]) -> Ask:
    """A question of a kind, as people type it."""
    chosen = rng.choice([each for each in pool if each.kind == kind])
    return Ask(kind, varied(chosen.question, rng), chosen.answer, chosen.judge, chosen.question)
