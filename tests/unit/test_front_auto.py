"""The model name auto: a small or a large upstream model, by the routing policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.auto_models import auto_models
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.opening import EngineOptions, check_options
from nearfar.fallback_server.engines.upstream import UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from tests.support.clouds import DONE, STREAM, Cloud, Json, chatting, free_port, reply, said
from tests.support.commands import nearfar
from tests.support.fronts import opened_fronts

CHAT = "/v1/chat/completions"
EASY = "What color is the sky?"
HARD = (
    "Prove that the determinant of an orthogonal matrix over the reals is 1 or -1, derive the eigenvalues of "
    "a rotation in three dimensions, and compute the integral of x^2 e^{-x^2} over the reals step by step."
)


def cloud(small_up: bool = True) -> Cloud:
    """A server with two models that names the requested one in its answer; the small one has a context of 200
    tokens.
    """

    def answer(path: str, body: Json) -> Iterator[bytes]:
        if path == "/v1/models":
            models = [{"id": "small", "max_model_len": 200}, {"id": "large", "max_model_len": 4000}]
            yield reply("200 OK", {"data": models if small_up else models[1:]})
        elif path == CHAT:
            yield STREAM + said(body["model"]) + said(finish="stop") + DONE
        else:
            yield reply("404 Not Found", {})

    return Cloud(answer)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Any]:
    with opened_fronts() as fronts:

        def make(
            policy: Json | None = None, small_up: bool = True, app: AppOptions | None = None
        ) -> httpx.Client:
            file = tmp_path / "policy.json"
            file.write_text(json.dumps(policy or {"difficulty_threshold": 0.5}))
            auto = auto_models("small,large", file)
            return fronts(cloud(small_up), app=app, key=None, auto=auto)[1]

        yield make


def chosen(client: httpx.Client, text: str, key: str = "", **more: Any) -> Any:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "max_tokens": 50, **more}
    answered = client.post(CHAT, json=body, headers={"x-api-key": key})
    return answered.json()["choices"][0]["message"]["content"] if answered.is_success else answered


def test_difficulty_and_length_choose(front: Any) -> None:
    client = front()
    assert chosen(client, EASY) == "small"
    assert chosen(client, HARD) == "large"
    assert chosen(client, EASY, max_tokens=190) == "large", "its context is too small"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small", "large", "auto"]
    assert chosen(client, EASY, max_tokens=5000) == "large", "it refuses, or takes, what is too long"
    assert chosen(client, "word " * 60_000) == "large"
    assert chosen(front(small_up=False), "word " * 60_000) == "large"
    assert chosen(front({"mode": "device_only"}), "word " * 60_000) == "small"


def test_the_policy_is_followed(front: Any) -> None:
    assert chosen(front({"mode": "prefer_cloud"}), EASY) == "large"
    assert chosen(front({"mode": "device_only"}), HARD) == "small"


def test_a_model_that_is_down_is_not_chosen(front: Any) -> None:
    assert chosen(front(small_up=False), EASY) == "large"


@pytest.mark.parametrize("stream", [False, True])
def test_the_other_model_answers_where_the_chosen_one_fails(stream: bool) -> None:
    """Until the next look at the list of models, the small model seems to be up."""

    def broken(path: str, body: Json) -> Iterator[bytes]:
        models = {"data": [{"id": "small", "max_model_len": 200}]}
        yield reply("200 OK", models) if path == "/v1/models" else reply("503 Service Unavailable", {})

    with opened_fronts() as fronts, Cloud(broken) as down:
        client = fronts(cloud(small_up=False), others=[down], auto=auto_models("small,large", None))[1]
        body: Json = {"model": "auto", "messages": [{"role": "user", "content": EASY}], "max_tokens": 50}
        answered = client.post(CHAT, json={**body, "stream": stream})
        assert answered.status_code == 200, answered.text
        assert '"large"' in answered.text
        assert down.posts(CHAT)


@pytest.mark.parametrize("text", ["漢字" * 60, "🙂" * 50])
def test_what_the_small_model_may_not_hold_goes_to_the_large_one(front: Any, text: str) -> None:
    """A character beyond ASCII can be several tokens."""
    assert chosen(front(), text) == "large"


def test_token_ids_are_counted() -> None:
    with opened_fronts() as fronts, cloud() as both:
        client = fronts(both, auto=auto_models("small,large", None))[1]
        client.post("/v1/completions", json={"model": "auto", "prompt": [5] * 300, "max_tokens": 9})
        assert [body["model"] for body in both.posts("/v1/completions")] == ["large"]


def test_a_key_gets_only_models_that_it_may_use(front: Any, tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", Key("alice", hashed("alice"), models=("auto", "large")))
    add_key(tmp_path / "keys.json", Key("bob", hashed("bob"), models=("small",)))
    client = front(app=AppOptions(keys=KeyStore(tmp_path / "keys.json")))
    assert chosen(client, EASY, "alice") == "large"
    assert chosen(client, EASY, "bob").status_code == 404


PAIRS: dict[str, Json] = {
    "/v1/tokenize": {"prompt": "a"},
    "/v1/detokenize": {"tokens": [1]},
    "/v1/rerank": {"query": "q", "documents": ["a"]},
    "/v2/rerank": {"query": "q", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/decisions": {
        "input": "a",
        "questions": [{"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": "b"}]}],
    },
    "/v1/embeddings": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/api/embed": {"input": "a"},
}


def test_a_path_that_needs_one_model_names_those_of_auto(front: Any, tmp_path: Path) -> None:
    client = front()
    for path, body in PAIRS.items():
        refused = client.post(path, json={"model": "auto", **body})
        said = f"'auto' is chosen for chats and completions only; for {path} name one of these models: "
        said += "small, large"
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error if path.startswith("/api") else error["message"]) == said
    assert 'requests_total{model_name="auto",outcome="refused"}' in client.get("/metrics").text
    add_key(tmp_path / "keys.json", Key("alice", hashed("alice"), models=("auto", "large")))
    client = front(app=AppOptions(keys=KeyStore(tmp_path / "keys.json")))
    body = {"model": "auto", "input": "a"}
    refused = client.post("/v1/embeddings", json=body, headers={"x-api-key": "alice"})
    assert refused.json()["error"]["message"].endswith("models: large"), "the key may not use the other"


def test_a_model_of_auto_that_no_server_lists_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with opened_fronts() as fronts, Cloud(chatting(model="small")) as cloud, caplog.at_level(logging.WARNING):
        _, client = fronts(cloud, key=None, auto=auto_models("small,nope", None))
        assert client.get("/ready").status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if "--auto" in record.getMessage()]
    assert line == (
        "--auto names nope, which no upstream server lists: small answers all requests to auto; they list "
        "small"
    )


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            ("--auto", "a,b"),
            "--auto chooses between models of other servers, but there are none",
        ),
        (("--upstream-continues",), "--upstream-continues says what other servers support"),
        (("--no-upstream-salts",), "--no-upstream-salts says what other servers reject"),
        (("--engine", "torch", "--auto", "a,b"), "but the engine is torch"),
    ],
)
def test_options_for_other_servers_are_refused_without_these(option: tuple[str, ...], said: str) -> None:
    done = nearfar("serve", "no/such/model", *option)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--reasoning", "off"), "--reasoning changes nothing where other servers compute"),
        (("--kv-memory", "5GB"), "--kv-memory changes nothing"),
        (("--threads", "2"), "--threads changes nothing"),
        (("--device", "cpu"), "--device changes nothing"),
        (("--trust",), "--trust changes nothing"),
        (("--vllm-option", "--x"), "--vllm-command or --vllm-option changes nothing"),
        (("--name", "m", "--auto", "a,b"), "--name m serves one model, and --auto stands for two"),
        (("--auto", "a,a"), "--auto takes two different models as SMALL,LARGE, not 'a,a'"),
        (("no/such/model",), "MODEL is one directory or hub id, or one or several URLs"),
        (("--engine", "torch", "http://127.0.0.1:9"), "the engine torch serves one model, not 2"),
    ],
)
def test_options_that_a_front_cannot_follow_are_refused_before_it_listens(
    given: tuple[str, ...], said: str
) -> None:
    done = nearfar("serve", "http://127.0.0.1:9", *given, "--port", str(free_port()))
    assert done.returncode == 1, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "listening" not in done.stderr


def test_auto_and_a_name_for_one_model_do_not_fit_together() -> None:
    options = EngineOptions(("m",), upstream=UpstreamOptions(auto=auto_models("a,b", None)))
    with pytest.raises(RequestError, match="leave out one"):
        check_options("upstream", options)


@pytest.mark.parametrize("wrong", ["", "a", "a,", ",b", "a,b,c", "a,a"])
def test_what_are_no_two_models(wrong: str) -> None:
    with pytest.raises(RequestError, match="SMALL,LARGE"):
        auto_models(wrong, None)


def test_a_policy_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"modus": 1}')
    with pytest.raises(RequestError, match="modus"):
        auto_models("a,b", tmp_path / "policy.json")
    with pytest.raises(RequestError, match="cannot be read"):
        auto_models("a,b", tmp_path / "none.json")
    (tmp_path / "policy.json").write_text('{"router": "router.json"}')
    with pytest.raises(RequestError, match="remove router"):
        auto_models("a,b", tmp_path / "policy.json")


def test_tokens_of_a_prompt_that_no_model_can_answer_are_counted(front: Any) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "long " * 8000}]}
    counted = front().post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 4000
