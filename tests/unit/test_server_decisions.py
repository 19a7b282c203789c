"""/v1/decisions through OpenAI's official client at its defaults, and /v1/score: probabilities of labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.edge_runtime.engine.scoring import score
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from tests.support.late import late
from tests.support.servers import MODEL, RunningServer, tiny_engine

openai = late("openai")

SUNNY = "The sun is out."
ASKED: list[Any] = [
    {"type": "predicate", "name": "dry", "instructions": "Is it dry?"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "What is it?"}],
        "choices": [{"value": "sun"}, {"value": "rain", "description": "wet"}, {"value": True}],
    },
    {
        "type": "score",
        "name": "light",
        "instructions": "How light is it?",
        "levels": [{"label": "dark"}, {"label": "dim"}, {"label": "bright"}],
    },
]


KEYS = (Key("alice", hashed("a")), Key("bob", hashed("b"), tokens_per_minute=60))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("decisions")
    for key in KEYS:
        add_key(folder / "keys.toml", key)
    options = AppOptions(keys=KeyStore(folder / "keys.toml"))
    made = RunningServer(lambda: tiny_engine(folder / "tokenizer"), options)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="a", max_retries=0)


def post(server: RunningServer, path: str, body: Any, key: str = "a") -> httpx.Response:
    return httpx.post(
        f"{server.address}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )


def sums(server: RunningServer, prompt: str, labels: list[str]) -> list[float]:
    """The engine's own results; the tokenizer has one token for each byte."""
    backend = server.app.state.service.engine.backend
    assert isinstance(backend, ArtifactBackend)
    codec = server.app.state.service.engine.codec
    tokens = [codec.encode_raw(each) for each in (prompt, *labels)]
    found = server.run(lambda: score(backend.core, tokens[0], tokens[1:]))
    return [sum(each) for each in found]


def test_the_official_client_gets_its_answers_in_the_order_of_the_questions(
    server: RunningServer, client: Any
) -> None:
    made = client.decisions.create(model=MODEL, input=SUNNY, questions=ASKED)
    dry, what, light = made.answers
    assert [(each.type, each.name) for each in made.answers] == [
        ("predicate", "dry"), ("choice", None), ("score", "light")
    ]  # fmt: skip
    shares = [each.probability for each in what.probabilities]
    assert [each.value for each in what.probabilities] == ["sun", "rain", True]
    assert sum(shares) == pytest.approx(1)
    assert what.choice == what.probabilities[shares.index(max(shares))].value
    assert what.confidence == pytest.approx((max(shares) * 3 - 1) / 2)
    assert [(each.value, each.label) for each in light.probabilities] == [
        (0, "dark"),
        (1, "dim"),
        (2, "bright"),
    ]
    assert light.score == pytest.approx(sum(each.value * each.probability for each in light.probabilities))
    asked = f"{SUNNY}\n\nIs it dry?\n\nIs this true? Answer with one word, Yes or No."
    prompt = f"<|bos|><|user|>{asked}<|end|><|assistant|>"
    yes, no = map(math.exp, sums(server, prompt, ["Yes", "No"]))
    assert dry.probability == pytest.approx(yes / (yes + no), rel=1e-3)
    assert (made.model, made.usage.output_tokens) == (MODEL, len(ASKED))
    assert made.usage.input_tokens == made.usage.total_tokens - len(ASKED) > 3 * len(SUNNY)


def test_a_conversation_is_the_input_and_a_neutral_text_calibrates(
    server: RunningServer, client: Any
) -> None:
    said: list[Any] = [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "Is 7 prime?"},
        {"role": "assistant", "content": "Yes."},
    ]
    plain = client.decisions.create(model=MODEL, input=said, questions=ASKED[:1])
    same = client.decisions.create(
        model=MODEL, input=SUNNY, questions=ASKED[1:2], extra_body={"neutral": SUNNY}
    )
    assert 0 < plain.answers[0].probability < 1
    assert [each.probability for each in same.answers[0].probabilities] == pytest.approx([1 / 3] * 3)
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    picture: list[Any] = [{"role": "user", "content": [image]}]
    with pytest.raises(openai.BadRequestError, match="only parts of type 'input_text' are taken"):
        client.decisions.create(model=MODEL, input=picture, questions=ASKED)


def test_scores_are_probabilities_of_labels_after_query_and_item(server: RunningServer) -> None:
    body = {"model": MODEL, "query": "Is it big? ", "items": ["mouse", "whale"], "labels": ["yes", "no"]}
    made = post(server, "/v1/score", body).json()
    for item, row in zip(body["items"], made["scores"], strict=True):
        told = [math.exp(each) for each in sums(server, f"<|bos|>Is it big? {item}", ["yes", "no"])]
        assert row == pytest.approx(told, rel=1e-3)
    relative = post(server, "/v1/score", {**body, "apply_softmax": True}).json()["scores"][0]
    assert relative == pytest.approx([each / sum(made["scores"][0]) for each in made["scores"][0]])
    ids = post(server, "/v1/score", {"query": [1, 2], "items": [[3], [4]], "label_token_ids": [5, 6]}).json()
    turned = post(
        server, "/v1/score", {"query": [3], "items": [[1, 2]], "label_token_ids": [5, 6], "item_first": True}
    ).json()
    assert turned["scores"][0] == pytest.approx(ids["scores"][0])
    assert ids["usage"] == {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/decisions", {"input": SUNNY, "questions": []}, 400, "questions"),
        (
            "/v1/decisions",
            {"input": SUNNY, "questions": [{"type": "guess", "instructions": "x"}]},
            400,
            "type",
        ),
        (
            "/v1/decisions",
            {"input": SUNNY, "questions": [{**ASKED[1], "choices": [{"value": "a"}, {"value": "a"}]}]},
            400,
            "an earlier choice",
        ),
        ("/v1/decisions", {"input": SUNNY, "questions": ASKED, "model": "none"}, 404, "no model"),
        ("/v1/decisions", {"input": SUNNY * 200, "questions": ASKED}, 400, "the input is too long"),
        (
            "/v1/decisions",
            {"input": SUNNY, "questions": [ASKED[0], {**ASKED[0], "name": "b", "instructions": SUNNY * 200}]},
            400,
            "the text of questions.1.instructions is too long",
        ),
        ("/v1/rerank", {"query": SUNNY * 200, "documents": ["a"]}, 400, "the query is too long"),
        ("/v1/rerank", {"query": "a", "documents": ["a", SUNNY * 200]}, 400, "text of documents.1 is too"),
        ("/v1/score", {"text_1": SUNNY * 200, "text_2": ["a"]}, 400, "the text_1 is too long"),
        ("/v1/score", {"query": SUNNY * 200, "items": ["a"], "labels": ["b"]}, 400, "the query is too"),
        ("/v1/completions", {"prompt": ["a", SUNNY * 200]}, 400, "prompt.1: this model's maximum context"),
        ("/v1/completions", {"prompt": SUNNY * 200}, 400, '"message":"this model\'s maximum context'),
        ("/v1/completions", {"prompt": [[1], [999]]}, 400, "prompt.1: token id 999 is outside"),
        ("/v1/completions", {"prompt": [1, 999]}, 400, "prompt: token id 999 is outside"),
        ("/v1/embeddings", {"input": ["a", SUNNY * 200]}, 400, "input.1: this model's maximum context"),
        ("/v1/detokenize", {"tokens": [1, 999]}, 400, "tokens.1: token id 999 is outside"),
        ("/v1/score", {"query": "a", "items": ["b"]}, 400, "label_token_ids and labels"),
        ("/v1/score", {"query": "a", "items": [], "labels": ["b"]}, 400, "items"),
        ("/v1/score", {"query": "a", "items": [[1]], "labels": ["b"]}, 400, "both"),
        ("/v1/score", {"query": [1], "items": [[1]], "label_token_ids": [261]}, 400, "vocabulary"),
        ("/v1/score", {"query": [1], "items": [[999]], "labels": ["b"]}, 400, "vocabulary"),
        ("/v1/score", {"query": "", "items": ["x"], "labels": ["b", "b"]}, 400, "labels.1: an earlier label"),
    ],
)
def test_what_cannot_be_decided_is_told(
    server: RunningServer, path: str, body: Any, status: int, said: str
) -> None:
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    assert said in answer.text
    service = server.app.state.service
    assert (service.live, service.admission.requests, service.admission.tokens) == ({}, 0, 0)


def test_a_key_pays_for_its_decisions(server: RunningServer) -> None:
    answer = post(server, "/v1/decisions", {"input": SUNNY, "questions": ASKED}, key="b")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "tokens_per_minute"
    body = {"query": [1, 2, 3], "items": [[4]] * 4, "label_token_ids": [5, 6]}
    assert [post(server, "/v1/score", body, key="b").status_code for _ in range(3)] == [200, 200, 429]


def test_one_tenant_does_not_find_the_prompts_of_another(server: RunningServer) -> None:
    backend = server.app.state.service.engine.backend
    tokens = list(range(60, 130))
    body = {"query": tokens, "items": [[9]], "label_token_ids": [5]}
    assert post(server, "/v1/score", body).status_code == 200
    index = backend.core.scheduler.table.index
    alice, bob = (key.tenant.salt for key in KEYS)
    assert [len(index.lookup(tokens, 4, salt)) for salt in (alice, bob, "")] == [4, 0, 0]
