"""/v1/rerank: how well documents answer a query, in Jina's and Cohere's shapes, from a decoder that judges
each.

The form of the prompt is that of Qwen3-Reranker (Zhang et al., "Qwen3 Embedding", 2025): the model is asked
whether the document meets the requirements, and the score is the probability of "yes" against "no".
"""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import Field, StringConstraints, Tag

from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.fallback_server.engines.base import Question, Scores
from nearfar.fallback_server.http.apis.asking import Record, longest_of
from nearfar.fallback_server.http.fields import SILENT, Strict, few, many, one_of
from nearfar.fallback_server.http.schemas import ModelName

MAX_DOCUMENTS = 1024
YES, NO = "yes", "no"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of a request that gives none: the one that the model's makers use."""
TEMPLATE = {"enable_thinking": False}
"""Variables of the chat template: the answer comes at once, after an empty thought."""

NonEmpty = Annotated[str, StringConstraints(min_length=1)]


class Document(Strict):
    """A document as an object."""

    place = "documents."
    text: NonEmpty


Documents = Annotated[
    Annotated[list[NonEmpty], many(MAX_DOCUMENTS, 1), few(MAX_DOCUMENTS), Tag("list[str]")]
    | Annotated[list[Document], many(MAX_DOCUMENTS, 1), few(MAX_DOCUMENTS), Tag("list[document]")],
    one_of(
        {str: "list[str]", dict: "list[document]", Document: "list[document]"},
        "this must be a list of strings, or of objects with a text",
    ),
]


class RerankRequest(Strict):
    """/v1/rerank and /v2/rerank. `instruction`: an extension of nearfar, what makes a document relevant."""

    model: ModelName = None
    query: NonEmpty | Document
    documents: Documents
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    instruction: Annotated[str | None, Field(max_length=4096)] = None
    max_tokens_per_doc: Annotated[int | None, SILENT] = None
    user: Annotated[str | None, Field(max_length=512), SILENT] = None

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def asked(self) -> str:
        """The query as text."""
        return self.query if isinstance(self.query, str) else self.query.text


def question(
    query: str, document: str, instruction: str | None, place: str, query_place: str = "query"
) -> Question:
    """Return what the engine is asked about a document. `place`, `query_place`: where the request has the
    document and the query.
    """
    said = f"<Instruct>: {instruction or INSTRUCTION}\n\n<Query>: {query}\n\n<Document>: {document}"
    messages = ({"role": "system", "content": JUDGE}, {"role": "user", "content": said})
    longest = longest_of({
        place: len(document), query_place: len(query), "instruction": len(instruction or "")
    })  # fmt: skip
    return Question((YES, NO), messages, place=place, longest=longest)


def relevances(scores: Scores) -> list[float]:
    """Return the probability of "yes" of each question."""
    return [
        label_odds(labels, [sum(each) for each in found]).probabilities[0]
        for found, labels in zip(scores.found, scores.labels, strict=True)
    ]


def ranked(body: RerankRequest, model: str, scores: Scores) -> Record:
    """Return the documents in order of relevance, with what Jina's and Cohere's clients read."""
    found, texts = relevances(scores), body.texts
    order = sorted(range(len(found)), key=lambda at: (-found[at], at))[: body.top_n]
    results: list[Record] = [{"index": at, "relevance_score": found[at]} for at in order]
    if body.return_documents:
        results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }
