"""A front names, counts and charges the model that answers, also where a request names `auto`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from nearfar.auto_models import auto_models
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.http.prices import parse_prices
from tests.support.clouds import DONE, STREAM, Cloud, Json, described, event, reply, usage
from tests.support.fronts import opened_fronts

HELLO = [{"role": "user", "content": "What color is the sky?"}]
TOKENS = {"small": (7, 3), "large": (11, 5)}
"""Tokens of prompt and answer that each model reports."""
ASKED: dict[str, Json] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "The sky is"},
    "/v1/responses": {"input": "What color is the sky?"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/api/chat": {"messages": HELLO},
    "/api/generate": {"prompt": "What color is the sky?"},
}
STREAMS = [(path, stream) for path in ASKED for stream in (False, True)]


def answer(path: str, body: Json) -> Iterator[bytes]:
    """Two models, which their answers name."""
    if path == "/v1/models":
        yield reply("200 OK", {"data": [{"id": name} for name in TOKENS]})
        return
    if path == "/openapi.json":
        yield reply("200 OK", described({"/v1/rerank": ["model", "query"]}))
        return
    prompt, made = TOKENS[body["model"]]
    if path == "/v1/rerank":
        yield reply("200 OK", {"results": [], "usage": {"total_tokens": prompt}})
    elif path == "/v1/embeddings":
        vector = {"index": 0, "embedding": [1.0]}
        yield reply("200 OK", {"data": [vector], "usage": {"prompt_tokens": prompt}})
    elif path == "/v1/completions":
        choice = {"index": 0, "text": "blue", "finish_reason": "stop"}
        yield STREAM + event({"model": body["model"], "choices": [choice]}) + usage(prompt, made) + DONE
    else:
        choice = {"index": 0, "delta": {"content": "blue"}, "finish_reason": "stop"}
        yield STREAM + event({"model": body["model"], "choices": [choice]}) + usage(prompt, made) + DONE


@dataclass
class Front:
    """A front of the cloud above."""

    client: httpx.Client
    audit: AuditLog
    file: Path

    def audited(self) -> list[Json]:
        self.audit.flush()
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def figures(self) -> dict[str, float]:
        """The figures that are not zero, by name and labels."""
        text = self.client.get("/metrics").text
        found = (re.fullmatch(r"nearfar:(\S+?_total\{.*\}) (\S+)", line) for line in text.splitlines())
        return {match[1]: float(match[2]) for match in found if match and float(match[2])}


WITHOUT_MODEL: list[tuple[str, str, Json]] = [
    *(("POST", path, body) for path, body in ASKED.items()),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/v1/tokenize", {"prompt": "x"}),
    ("POST", "/v1/detokenize", {"tokens": [1]}),
    ("POST", "/v1/messages/count_tokens", {"messages": HELLO}),
    ("POST", "/v1/rerank", {"query": "x", "documents": ["a"]}),
    ("POST", "/v1/classify", {"input": "x"}),
    ("POST", "/api/chat", {}),
    ("POST", "/api/show", {}),
    ("GET", "/v1/models/other", {}),
]


@pytest.mark.parametrize("names", [(), ("other",)])
def test_all_requests_get_503_until_an_upstream_lists_a_model(names: tuple[str, ...]) -> None:
    with opened_fronts() as fronts, Cloud(lambda path, body: [reply("503 No", "")]) as cloud:
        _, client = fronts(cloud, names)
        assert client.get("/v1/models").json()["data"] == []
        for method, path, body in WITHOUT_MODEL:
            for named in ({}, {"model": "other"}):
                answered = client.request(method, path, json={**body, **named} if method == "POST" else None)
                assert answered.status_code == 503, (path, named, answered.text)
                assert "no model yet" in answered.text


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    file = tmp_path_factory.mktemp("front") / "audit.jsonl"
    audit = AuditLog(file, False)
    app = AppOptions(audit=audit, prices=parse_prices(["small=1000000,0", "large=0,1000000"]))
    with opened_fronts() as fronts, Cloud(answer) as cloud:
        yield Front(fronts(cloud, app=app, key=None, auto=auto_models("small,large", None))[1], audit, file)


def names(text: str) -> set[str]:
    """All names of models in an answer."""
    return set(re.findall(r'"model"\s*:\s*"(.*?)"', text))


@pytest.mark.parametrize(("path", "stream"), STREAMS)
def test_an_answer_to_auto_names_the_model_that_wrote_it(front: Front, path: str, stream: bool) -> None:
    before = front.figures()
    answered = front.client.post(path, json={"model": "auto", "stream": stream, **ASKED[path]})
    assert answered.status_code == 200, answered.text
    assert names(answered.text) == {"small"}
    assert front.audited()[-1]["model"] == "small"
    after = front.figures()
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name)}
    assert grown == {
        'requests_total{model_name="small",outcome="ok"}': 1,
        'request_success_total{finished_reason="stop",model_name="small"}': 1,
        'prompt_tokens_total{model_name="small"}': 7,
        'generation_tokens_total{model_name="small"}': 3,
        'key_tokens_total{key="anonymous",kind="prompt",model_name="small"}': 7,
        'key_tokens_total{key="anonymous",kind="generation",model_name="small"}': 3,
        'cost_total{key="anonymous",model_name="small"}': 7,
        'prefix_cache_queries_total{model_name="small"}': 7,
        **{name: value for name, value in grown.items() if name.startswith("key_seconds_total")},
    }
    assert "auto" not in front.client.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "made"), [("/v1/chat/completions", 5), ("/v1/rerank", 0), ("/v1/embeddings", 0)]
)
def test_tokens_count_for_the_model_that_computed_them(front: Front, path: str, made: int) -> None:
    before = front.figures()
    more = {"query": "q", "documents": ["a"], "input": "a"} | ASKED.get(path, {})
    assert front.client.post(path, json={"model": "large", **more}).status_code == 200
    after = front.figures()
    for name, tokens in (("prompt", 11), ("generation", made)):
        for model, wanted in (("small", 0), ("large", tokens)):
            figure = f'{name}_tokens_total{{model_name="{model}"}}'
            assert after.get(figure, 0) - before.get(figure, 0) == wanted, figure
            figure = f'key_tokens_total{{key="anonymous",kind="{name}",model_name="{model}"}}'
            assert after.get(figure, 0) - before.get(figure, 0) == wanted, figure
    figure = 'cost_total{key="anonymous",model_name="large"}'
    assert after.get(figure, 0) - before.get(figure, 0) == made


def test_no_figure_is_under_an_empty_name(tmp_path: Path) -> None:
    """Requests that are refused before their model is known are counted under "unknown"."""
    add_key(tmp_path / "keys.json", Key("alice", hashed("alice")))
    app = AppOptions(keys=KeyStore(tmp_path / "keys.json"))
    with opened_fronts() as fronts, Cloud(answer) as cloud:
        client = fronts(cloud, app=app, key=None)[1]
        headers = {"x-api-key": "alice"}
        body = {"model": "other", "messages": HELLO}
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 404
        text = client.get("/metrics").text
    assert 'model_name=""' not in text
    assert 'nearfar:requests_total{model_name="unknown",outcome="refused"} 1.0' in text
    assert re.findall(r".*unknown.*", text) == [
        'nearfar:requests_total{model_name="unknown",outcome="refused"} 1.0',
        *re.findall(r"nearfar:requests_created.*unknown.*", text),
    ]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/chat/completions"])
def test_an_audit_log_with_text_has_what_was_asked_and_answered(tmp_path: Path, path: str) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl", True)
    body = {
        "model": "small",
        **({"messages": HELLO} if "chat" in path else {"query": "x", "documents": ["a"]}),
    }
    with opened_fronts() as fronts, Cloud(answer) as cloud:
        client = fronts(cloud, app=AppOptions(audit=audit), key=None)[1]
        answered = client.post(path, json=body)
        audit.flush()
    entry = json.loads((tmp_path / "audit.jsonl").read_text())
    if "chat" in path:
        assert (entry["prompt"], entry["answer"]) == (HELLO, ["blue"])
    else:
        assert (entry["prompt"], entry["answer"]) == (body, [answered.text])


def test_an_estimated_number_of_tokens_is_said_to_be_one(tmp_path: Path) -> None:
    for name, limits in (("alice", {"tokens_per_minute": 10}), ("bob", {"tokens_per_day": 115})):
        add_key(tmp_path / "keys.json", Key(name, hashed(name), **limits))  # type: ignore[arg-type]
    app = AppOptions(keys=KeyStore(tmp_path / "keys.json"))
    body = {"model": "small", "messages": [{"role": "user", "content": "x" * 400}]}
    with opened_fronts() as fronts, Cloud(answer) as cloud:
        client = fronts(cloud, app=app, key=None)[1]

        def refused(name: str) -> str:
            answered = client.post("/v1/chat/completions", json=body, headers={"x-api-key": name})
            return str(answered.json().get("error", {}).get("message", ""))

        about = r"about 1\d\d tokens \(an estimate: the tokenizer is at another server\)"
        assert re.fullmatch(rf"the prompt has {about}; this key may send 10 a minute", refused("alice"))
        assert refused("bob") == ""  # 10 tokens, as its upstream tells afterwards
        assert re.search(rf"too few are left for this prompt of {about}; the budget", refused("bob"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize(("length", "most", "allowed"), [(400, 200, 9), (1, 20, 2)])
def test_a_key_pays_what_its_upstream_counts_and_not_the_estimate(
    tmp_path: Path, path: str, length: int, most: int, allowed: int
) -> None:
    """The upstream counts 7 tokens or 10. The estimates are 100 to 111 tokens, and 1 to 9."""
    add_key(tmp_path / "keys.json", Key("bob", hashed("bob"), tokens_per_day=most))
    text = "x" * length
    bodies: dict[str, Json] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/embeddings": {"input": text},
        "/v1/rerank": {"query": text, "documents": ["a"]},
    }
    with opened_fronts() as fronts, Cloud(answer) as cloud:
        client = fronts(cloud, app=AppOptions(keys=KeyStore(tmp_path / "keys.json")), key=None)[1]
        body = {"model": "small", **bodies[path]}
        asked = [client.post(path, json=body, headers={"x-api-key": "bob"}) for _ in range(allowed + 2)]
        statuses = [each.status_code for each in asked]
        assert statuses[:allowed] == [200] * allowed
        if most == 20:
            assert statuses[-1] == 429
