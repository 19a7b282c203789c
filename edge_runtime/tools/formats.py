"""Finds the format of a model's answers: from its artifact, or from its chat template."""

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
    """The rows of format/families.json: `signs`, all of which a chat template must have, and the format they
    imply.
    """
    text = resources.files("nearfar.format").joinpath("families.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def shown_format(templates: Sequence[str] | str, config: Mapping[str, Any] | None = None) -> AnswerFormat:
    """The format that chat templates show: each part from the first template that shows it, by the first
    matching row.

    `config`: tokenizer_config.json; its `response_template` takes precedence, if a record can express it.
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
    """The blanks that models write between these marks, which a response_template does not give."""
    parts = (row["answers"].get("calls", {}) for row in families())
    same = (
        part
        for part in parts
        if (part.get("begin"), part.get("end")) == (calls["begin"], calls["end"])
        and ("named" in part) == ("named" in calls)
    )
    return {name: value for name, value in next(same, {}).items() if name in ("blank", "separator")}
