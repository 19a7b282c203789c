"""/v1/rerank in the shapes of Jina's and Cohere's clients, with a decoder that judges each document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.edge_runtime.engine.scoring import score
from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.fallback_server.http.apis.rerank import INSTRUCTION, JUDGE
from tests.support import tiny
from tests.support.servers import MODEL, RunningServer, tiny_engine, tokenizer_directory

THINKING = (
    tiny.TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
DOCUMENTS = ["The sun is out.", "It rains.", "Bread is baked."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("rerank")
    tokenizer_directory(folder, THINKING)
    made = RunningServer(lambda: tiny_engine(folder))
    yield made
    made.close()


def rerank(server: RunningServer, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    asked = {"model": MODEL, "query": "weather", "documents": DOCUMENTS, **body}
    return httpx.post(f"{server.address}{path}", json=asked, timeout=60)


def expected(server: RunningServer, text: str) -> float:
    """The probability of "yes" after the prompt of Qwen3-Reranker's form, from the engine itself."""
    said = f"<Instruct>: {INSTRUCTION}\n\n<Query>: weather\n\n<Document>: {text}"
    messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": said}]
    asked = {"model": MODEL, "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    tokens = httpx.post(f"{server.address}/v1/tokenize", json=asked, timeout=60).json()["tokens"]
    engine = server.app.state.service.engine
    labels = [engine.codec.encode_raw(each) for each in ("yes", "no")]
    found = server.run(lambda: score(engine.backend.core, tokens, labels))
    shares = label_odds([tuple(each) for each in labels], [sum(each) for each in found])
    return shares.probabilities[0]


def test_a_score_is_the_share_of_yes_after_the_models_own_form(server: RunningServer) -> None:
    found = {each["index"]: each["relevance_score"] for each in rerank(server).json()["results"]}
    assert [found[at] for at in range(3)] == pytest.approx(
        [expected(server, text) for text in DOCUMENTS], rel=1e-4
    )


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_order_with_their_scores(server: RunningServer, path: str) -> None:
    answered = rerank(server, path)
    assert answered.status_code == 200, answered.text
    found = answered.json()
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in found["results"]) == [0, 1, 2]
    assert all(0 < each < 1 for each in scores)
    assert len(set(scores)) == 3
    assert found["usage"]["total_tokens"] > 100
    assert set(found["results"][0]) == {"index", "relevance_score"}


def test_a_document_as_an_object_and_the_first_ones_with_their_text(server: RunningServer) -> None:
    whole = rerank(server).json()["results"]
    found = rerank(
        server, documents=[{"text": text} for text in DOCUMENTS], top_n=2, return_documents=True,
        query={"text": "weather"},
    ).json()["results"]  # fmt: skip
    assert [each["index"] for each in found] == [each["index"] for each in whole[:2]]
    assert [each["relevance_score"] for each in found] == pytest.approx(
        [each["relevance_score"] for each in whole[:2]]
    )
    assert [each["document"]["text"] for each in found] == [DOCUMENTS[each["index"]] for each in found]


def test_the_instruction_is_part_of_the_prompt(server: RunningServer) -> None:
    plain, other = rerank(server).json(), rerank(server, instruction="Find what is about bread").json()
    assert other["usage"]["total_tokens"] != plain["usage"]["total_tokens"]


@pytest.mark.parametrize(
    "wrong",
    [{"documents": []}, {"documents": "x"}, {"documents": [3]}, {"documents": [{"text": ""}]}, {"query": ""},
     {"top_n": 0}, {"documents": ["x"] * 1025}, {"documents": ["x", {"text": "y"}]}, {"model": "other"}],
)  # fmt: skip
def test_what_is_no_request(server: RunningServer, wrong: Any) -> None:
    answered = rerank(server, **wrong)
    assert answered.status_code in (400, 404)
    assert answered.json()["error"]["message"]


def scores(server: RunningServer, path: str = "/v1/score", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.address}{path}", json={"model": MODEL, **body}, timeout=60)


def test_pairs_of_texts_get_vllms_scores(server: RunningServer) -> None:
    found = scores(server, text_1="weather", text_2=DOCUMENTS).json()
    assert [(each["index"], each["object"]) for each in found["data"]] == [(at, "score") for at in range(3)]
    ranked = {each["index"]: each["relevance_score"] for each in rerank(server).json()["results"]}
    values = [each["score"] for each in found["data"]]
    assert values == pytest.approx([ranked[at] for at in range(3)], rel=1e-4)
    again = scores(server, path="/score", queries=["weather"] * 3, documents=DOCUMENTS).json()
    assert [each["score"] for each in again["data"]] == pytest.approx(values, rel=1e-4)
    (one,) = scores(server, text_1="weather", text_2=DOCUMENTS[0]).json()["data"]
    assert one["score"] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text_1": "a"}, "one form"),
        ({"text_1": "a", "documents": ["b"]}, "one form"),
        ({"text_1": "a", "text_2": "b", "items": ["c"]}, "one form"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "2 and 1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 and 3"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": 5}, "text_2"),
        ({"text_1": "a", "text_2": "b", "labels": ["c"]}, "labels"),
        ({}, "text_1 and text_2"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(server: RunningServer, body: dict[str, Any], says: str) -> None:
    answered = scores(server, **body)
    assert answered.status_code == 400
    assert says in answered.text
