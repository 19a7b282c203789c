"""/v1/score: probabilities of labels after a query and each of several items, in SGLang's shape; and how well
texts answer others, in vLLM's, by the judgement of /v1/rerank.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence as Seq
from typing import Annotated, Any

from pydantic import Field, Tag, field_validator, model_validator

from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.fallback_server.engines.base import Prompt, Question, Scores
from nearfar.fallback_server.http.apis.asking import Record, longest_of
from nearfar.fallback_server.http.apis.rerank import TEMPLATE, question, relevances
from nearfar.fallback_server.http.fields import Strict, Text, TokenId, Tokens, few, many, one_of
from nearfar.fallback_server.http.places import differing
from nearfar.fallback_server.http.schemas import ModelName
from nearfar.format.requests import MAX_LABEL_CHARS, MAX_LABELS

MAX_ITEMS = 1024

Query = Annotated[
    Text | Annotated[Tokens, Tag("list[int]")], one_of({int: "list[int]"}, "a string or token ids")
]
Items = Annotated[
    Annotated[list[str], many(MAX_ITEMS, 1), few(MAX_ITEMS), Tag("list[str]")]
    | Annotated[list[Tokens], many(MAX_ITEMS, 1), few(MAX_ITEMS), Tag("list[list]")],
    one_of(
        {str: "list[str]", list: "list[list]"}, "this must be a list of strings, or of lists of token ids"
    ),
]


NonEmpty = Annotated[str, Field(min_length=1)]
Texts = Annotated[
    Annotated[NonEmpty, Tag("str")]
    | Annotated[list[NonEmpty], many(MAX_ITEMS, 1), few(MAX_ITEMS), Tag("list[str]")],
    one_of({str: "list[str]"}, "this must be a string or a list of strings"),
]


class ScoreBody(Strict):
    """/v1/score. A prompt is the query and an item, or the item and the query (`item_first`).

    `text_1` and `text_2`, also named `queries` and `documents`: vLLM's form, one score for each pair.

    `label_token_ids`: single tokens; `labels`, an extension of nearfar: texts of any number of tokens.
    `apply_softmax`: probabilities among the labels, instead of among all continuations.
    """

    model: ModelName = None
    query: Query = ""
    items: Items | None = None
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
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @field_validator("labels", "label_token_ids")
    @classmethod
    def _differ(cls, given: list[Any] | None) -> list[Any] | None:
        differing(given, "an earlier label is the same: give each label once")
        return given

    @property
    def pairs(self) -> list[tuple[str, str]] | None:
        """The pairs of texts to compare; None for a query and items."""
        first = self.text_1 if self.text_1 is not None else self.queries
        second = self.text_2 if self.text_2 is not None else self.documents
        if first is None or second is None:
            return None
        ones = [first] if isinstance(first, str) else first
        others = [second] if isinstance(second, str) else second
        return list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))

    @model_validator(mode="after")
    def _fits_together(self) -> ScoreBody:
        one, other = ("text_1", "text_2"), ("queries", "documents")
        given = [[name for name in names if getattr(self, name) is not None] for names in (one, other)]
        if any(given):
            return self._pairs_fit(given)
        if self.items is None:
            raise ValueError("give query and items, or text_1 and text_2")
        if (self.label_token_ids is None) == (self.labels is None):
            raise ValueError("give one of label_token_ids and labels")
        if self.query and any(
            isinstance(self.query, str) != isinstance(item, str) for item in self.items[:1]
        ):
            raise ValueError("query and items must both be texts, or both be token ids")
        return self

    def _pairs_fit(self, given: list[list[str]]) -> ScoreBody:
        if sorted(map(len, given)) != [0, 2] or self.items is not None or self.query:
            raise ValueError("give one form: text_1 and text_2, or queries and documents, or query and items")
        if self.labels is not None or self.label_token_ids is not None:
            raise ValueError("labels belong to query and items: leave them out")
        counts = [
            1 if isinstance(texts, str) else len(texts)
            for texts in (getattr(self, name) for names in given for name in names)
        ]
        if counts[0] not in (1, counts[1]):
            raise ValueError(
                f"the first texts must be one, or as many as the second ones: they are {counts[0]} and "
                f"{counts[1]}"
            )
        return self


def questions_of(body: ScoreBody) -> list[Question]:
    """Return what the engine is asked, an item or a pair each."""
    if (pairs := body.pairs) is not None:
        first, second = ("text_1", "text_2") if body.text_2 is not None else ("queries", "documents")
        return [
            question(one, other, None, _entry(body, second, at), _entry(body, first, at))
            for at, (one, other) in enumerate(pairs)
        ]
    labels: tuple[Prompt, ...] = (
        tuple(body.labels)
        if body.labels is not None
        else tuple((token,) for token in body.label_token_ids or ())
    )
    named = "labels" if body.labels is not None else "label_token_ids"
    items: Seq[str | list[int]] = body.items or ()
    return [
        Question(
            labels,
            prompt=_joined(body, item),
            place=f"items.{at}",
            labels_place=named,
            longest=longest_of({f"items.{at}": len(item), "query": len(body.query)}),
        )
        for at, item in enumerate(items)
    ]


def _entry(body: ScoreBody, name: str, at: int) -> str:
    """Return where a field has the text of pair `at`: a field may have one text for all pairs."""
    given = getattr(body, name)
    if isinstance(given, str):
        return name
    return f"{name}.{at if len(given) > 1 else 0}"


def _joined(body: ScoreBody, item: str | list[int]) -> Prompt:
    query = body.query
    if isinstance(item, str):
        text = query if isinstance(query, str) else ""
        return item + text if body.item_first else text + item
    tokens = [] if isinstance(query, str) else query
    return (*item, *tokens) if body.item_first else (*tokens, *item)


def template_of(body: ScoreBody) -> dict[str, bool] | None:
    """Return the variables of the chat template; None where the prompts are not conversations."""
    return None if body.pairs is None else TEMPLATE


def scored(body: ScoreBody, model: str, scores: Scores) -> Record:
    """Return the probabilities of the labels, an item a row; or the score of each pair."""
    if body.pairs is not None:
        return _pairs_scored(model, scores)
    rows = []
    for found, labels in zip(scores.found, scores.labels, strict=True):
        sums = [sum(each) for each in found]
        whole = body.apply_softmax
        rows.append(
            list(label_odds(labels, sums).probabilities) if whole else [math.exp(each) for each in sums]
        )
    usage = {"prompt_tokens": scores.tokens, "completion_tokens": 0, "total_tokens": scores.tokens}
    return {"object": "scoring", "model": model, "scores": rows, "usage": usage}


def _pairs_scored(model: str, scores: Scores) -> Record:
    data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(relevances(scores))]
    usage = {"prompt_tokens": scores.tokens, "completion_tokens": 0, "total_tokens": scores.tokens}
    return {
        "id": f"score-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage,
    }
