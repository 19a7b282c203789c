"""Which format a model's answers have: as its artifact says, or as its chat template shows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from nearfar.edge_runtime.tools.response_template import told_by
from nearfar.format.answers import AnswerFormat
from nearfar.format.conversion import record


@functools.cache
def families() -> list[dict[str, Any]]:
    """The rows of format/families.json: `signs` that all stand in a chat template, and what they tell of its
    answers.
    """
    text = resources.files("nearfar.format").joinpath("families.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def shown_format(templates: Sequence[str] | str, config: Mapping[str, Any] | None = None) -> AnswerFormat:
    """The format that chat templates show their model: each part from the first template that shows it, and
    there from the first row that tells it.

    `config`: tokenizer_config.json; its `response_template`, where there is one that can be told in a record,
    comes first.
    """
    told = dict(told_by((config or {}).get("response_template")) or {})
    if "calls" in told:
        told["calls"] = {**_blanks(told["calls"]), **told["calls"]}
    for template in (templates,) if isinstance(templates, str) else templates or ("",):
        for row in families():
            if all(sign in template for sign in row["signs"]):
                told = {**row["answers"], **told}
    form: AnswerFormat = record(AnswerFormat, told)
    return form


def _blanks(calls: Mapping[str, Any]) -> dict[str, Any]:
    """What models are known to write between these marks, which a response_template does not tell."""
    parts = (row["answers"].get("calls", {}) for row in families())
    same = (
        part
        for part in parts
        if (part.get("begin"), part.get("end")) == (calls["begin"], calls["end"])
        and ("named" in part) == ("named" in calls)
    )
    return {name: value for name, value in next(same, {}).items() if name in ("blank", "separator")}
