"""/v1/score: probabilities of labels after a query and each of several items, in SGLang's shape."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, Tag, model_validator

from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.fallback_server.engines.base import Prompt, Question, Scores
from nearfar.fallback_server.http.apis.asking import Record
from nearfar.fallback_server.http.fields import Strict, Text, TokenId, Tokens, few, many, one_of
from nearfar.fallback_server.http.schemas import ModelName
from nearfar.format.requests import MAX_LABEL_CHARS, MAX_LABELS

MAX_ITEMS = 1024

Query = Annotated[
    Text | Annotated[Tokens, Tag("list[int]")], one_of({int: "list[int]"}, "a string or token ids")
]
Items = Annotated[
    Annotated[list[str], many(MAX_ITEMS), few(MAX_ITEMS), Tag("list[str]")]
    | Annotated[list[Tokens], many(MAX_ITEMS), few(MAX_ITEMS), Tag("list[list]")],
    one_of(
        {str: "list[str]", list: "list[list]"}, "this must be a list of strings, or of lists of token ids"
    ),
]


class ScoreBody(Strict):
    """/v1/score. A prompt is the query and an item, or the item and the query (`item_first`).

    `label_token_ids`: single tokens; `labels`, an extension of nearfar: texts of any number of tokens.
    `apply_softmax`: probabilities among the labels, instead of among all continuations.
    """

    model: ModelName = None
    query: Query = ""
    items: Items
    label_token_ids: Annotated[list[TokenId], many(MAX_LABELS, 1), few(MAX_LABELS)] | None = None
    labels: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]],
            many(MAX_LABELS, 1),
            few(MAX_LABELS),
        ]
        | None
    ) = None
    apply_softmax: bool | None = None
    item_first: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ScoreBody:
        if (self.label_token_ids is None) == (self.labels is None):
            raise ValueError("give one of label_token_ids and labels")
        if self.query and any(
            isinstance(self.query, str) != isinstance(item, str) for item in self.items[:1]
        ):
            raise ValueError("query and items must both be texts, or both be token ids")
        given = self.labels or self.label_token_ids or []
        if len(set(given)) < len(given):
            raise ValueError("each label must differ from the others")
        if not self.items:
            raise ValueError("items must be at least one")
        return self


def questions_of(body: ScoreBody) -> list[Question]:
    """Return what the engine is asked, an item each."""
    labels: tuple[Prompt, ...] = (
        tuple(body.labels)
        if body.labels is not None
        else tuple((token,) for token in body.label_token_ids or ())
    )
    return [Question(labels, prompt=_joined(body, item)) for item in body.items]


def _joined(body: ScoreBody, item: str | list[int]) -> Prompt:
    query = body.query
    if isinstance(item, str):
        text = query if isinstance(query, str) else ""
        return item + text if body.item_first else text + item
    tokens = [] if isinstance(query, str) else query
    return (*item, *tokens) if body.item_first else (*tokens, *item)


def scored(body: ScoreBody, model: str, scores: Scores) -> Record:
    """Return the probabilities of the labels, an item a row."""
    rows = []
    for found, labels in zip(scores.found, scores.labels, strict=True):
        sums = [sum(each) for each in found]
        whole = body.apply_softmax
        rows.append(
            list(label_odds(labels, sums).probabilities) if whole else [math.exp(each) for each in sums]
        )
    usage = {"prompt_tokens": scores.tokens, "completion_tokens": 0, "total_tokens": scores.tokens}
    return {"object": "scoring", "model": model, "scores": rows, "usage": usage}
