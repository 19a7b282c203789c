"""Requests that a front forwards unchanged, to servers that list their paths."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.auto_models import auto_models
from nearfar.errors import RequestError
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from nearfar.remote.chunks import ShapeError
from nearfar.remote.forms import read_form
from nearfar.remote.openapi import listed_paths
from nearfar.remote.server import NATIVE
from tests.support.clouds import STREAM, Cloud, Json, chatting, described, listing, reply
from tests.support.fronts import opened_fronts

HELLO = [{"role": "user", "content": "Hi"}]
SALTED = ["model", "input", "cache_salt", "priority"]
Front = Callable[..., httpx.Client]


@pytest.fixture
def front() -> Iterator[Front]:
    """Makes a front of a cloud, and gives a client of it."""
    with opened_fronts() as fronts:
        yield lambda *given, **more: fronts(*given, **more)[1]


def server(paths: dict[str, list[str]], answer: bytes) -> Cloud:
    """A server that lists these paths, and gives one answer to all requests."""

    def answered(path: str, body: Json) -> Iterator[bytes]:
        if path == "/v1/models":
            yield listing("m")
        elif path == "/openapi.json":
            yield reply("200 OK", described(paths))
        else:
            yield answer

    return Cloud(answered)


RANKED = {
    "id": "r",
    "model": "m",
    "results": [{"index": 0, "relevance_score": 0.5}],
    "usage": {"total_tokens": 7},
}


@pytest.mark.parametrize("listed", ["/v1/rerank", "/rerank"])
@pytest.mark.parametrize("asked", ["/v1/rerank", "/rerank"])
def test_a_listed_path_is_forwarded_as_it_is(front: Front, listed: str, asked: str) -> None:
    with server({listed: ["model", "query"]}, reply("200 OK", RANKED)) as cloud:
        client = front(cloud, ("ours",))
        body = {"model": "ours", "query": "q", "documents": ["a"], "only_theirs": {"x": 1}}
        assert client.post(asked, json=body).json() == {**RANKED, "model": "ours"}
        assert cloud.posts(listed) == [{**body, "model": "m"}]
        assert 'prompt_tokens_total{model_name="ours"}' in client.get("/metrics").text
        assert client.post(asked, json={**body, "model": "other"}).status_code == 404


def test_a_path_that_no_server_lists_is_refused_or_answered_here(front: Front) -> None:
    with server({}, reply("200 OK", {})) as cloud:
        client = front(cloud)
        assert client.post("/v1/classify", json={"model": "m", "input": "x"}).status_code == 404
        refused = client.post("/v1/audio/speech", json={"model": "m", "input": "x"})
        assert "no upstream server offers /v1/audio/speech" in refused.json()["error"]["message"]
        assert cloud.posts() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": ""}, "model must be a name of 1 to 256 characters, not ''"),
        ({"model": 5}, "model must be a name of 1 to 256 characters, not 5"),
        ({"model": []}, "model must be a name of 1 to 256 characters, not a list"),
        ({"model": {}}, "model must be a name of 1 to 256 characters, not an object"),
        ({"model": "m" * 1999}, "model must be a name of 1 to 256 characters, not 1,999"),
        ({"cache_salt": 5}, "cache_salt must be a string of 1 to 512 characters, not 5"),
        ({"priority": 1.5}, "priority must be a whole number from -1000 to 1000, not 1.5"),
    ],
)
def test_a_wrong_field_of_a_forwarded_request_is_told_with_its_value(
    front: Front, given: Json, said: str
) -> None:
    with server({"/v1/messages": ["model"]}, reply("200 OK", {})) as cloud:
        answered = front(cloud).post("/v1/messages", json={"model": "m", "messages": HELLO, **given})
        assert (answered.status_code, answered.json()["error"]["message"]) == (400, said)
        assert cloud.posts() == []


EVENTS = (
    b'event: response.created\ndata: {"type":"response.created","response":{"model":"m","usage":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"x","delta":"\\"model\\": \\"m\\""}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"model" : "m",'
    b'"usage":{"input_tokens":5,"output_tokens":9}}}\n\n'
)


def test_a_stream_of_responses_is_passed_on_event_by_event(front: Front) -> None:
    with server({"/v1/responses": SALTED}, STREAM + EVENTS) as cloud:
        client = front(cloud, ("ours",))
        body = {"model": "ours", "input": "Hi", "store": False, "stream": True, "tools": [{"type": "mcp"}]}
        answered = client.post("/v1/responses", json=body)
        assert answered.content == EVENTS.replace(b'"model":"m"', b'"model":"ours"').replace(
            b'"model" : "m"', b'"model" : "ours"'
        )
        assert answered.headers["content-type"].startswith("text/event-stream")
        assert cloud.posts() == [{**body, "model": "m"}]
        assert 'request_generation_tokens_sum{model_name="ours"} 9.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 3},
        {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 3},
    ],
)
def test_cached_tokens_of_forwarded_requests_are_counted(front: Front, usage: Json) -> None:
    """Anthropic's API counts cached tokens apart from the other tokens of a prompt, OpenAI's among them."""
    with server({"/v1/messages": SALTED}, reply("200 OK", {"model": "m", "usage": usage})) as cloud:
        client = front(cloud)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        assert client.post("/v1/messages", json=body).status_code == 200
        text = client.get("/metrics").text
    for kind, tokens in (("prompt", 7.0), ("cached", 5.0), ("generation", 3.0)):
        assert f'key_tokens_total{{key="anonymous",kind="{kind}",model_name="m"}} {tokens}' in text
    assert 'nearfar:prefix_cache_hits_total{model_name="m"} 5.0' in text


def test_a_response_that_may_be_continued_is_answered_here(front: Front) -> None:
    with server({"/v1/responses": SALTED}, STREAM) as cloud:
        front(cloud).post("/v1/responses", json={"model": "m", "input": "Hi"})
        assert cloud.posts("/v1/responses") == []
        assert len(cloud.posts("/v1/chat/completions")) == 1


COUNTS: dict[str, Json] = {
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": HELLO},
}


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("model", ["m", "auto"])
def test_tokens_of_a_prompt_are_counted_by_the_server_of_the_model(
    front: Front, keyed: AppOptions, path: str, model: str
) -> None:
    with server({path: ["model"]}, reply("200 OK", {"input_tokens": 30})) as cloud:
        client = front(cloud, app=keyed, auto=auto_models("m,other", None))
        counted = client.post(path, json={"model": model, **COUNTS[path]}, headers=bearer("alice"))
        assert (counted.status_code, counted.json()) == (200, {"input_tokens": 30})
        assert cloud.posts() == [{"model": "m", **COUNTS[path]}]
        assert "x-nearfar-estimated" not in counted.headers


@pytest.mark.parametrize("path", COUNTS)
def test_an_estimated_count_is_marked(front: Front, path: str) -> None:
    """No server lists the path; a front of that front passes the mark on."""
    with server({}, reply("200 OK", {})) as cloud:
        counted = front(cloud).post(path, json={"model": "m", **COUNTS[path]})
        assert (counted.status_code, counted.headers["x-nearfar-estimated"]) == (200, "input_tokens")
        assert cloud.posts() == []
    theirs = reply("200 OK", {"input_tokens": 2}, "X-Nearfar-Estimated: input_tokens")
    with server({path: ["model"]}, theirs) as cloud:
        counted = front(cloud).post(path, json={"model": "m", **COUNTS[path]})
        assert counted.headers["x-nearfar-estimated"] == "input_tokens"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_does_not_say_it_is_json_is_not_forwarded(front: Front, kind: str | None) -> None:
    """A page of any site may send such a body without asking first."""
    with server({"/v1/rerank": ["model", "query"]}, reply("200 OK", RANKED)) as cloud:
        client = front(cloud)
        headers = {} if kind is None else {"Content-Type": kind}
        for path in ("/v1/rerank", "/v1/chat/completions"):
            answered = client.post(path, content=b'{"model": "m"}', headers=headers)
            assert (answered.status_code, "the header Content-Type says so" in answered.text) == (400, True)
        assert cloud.posts() == []


def test_tokens_after_a_stored_response_are_counted_here(front: Front) -> None:
    path = "/v1/responses/input_tokens"
    with server({path: ["model"]}, reply("200 OK", {"input_tokens": 30})) as cloud:
        client = front(cloud)
        for refers in (
            {"previous_response_id": "resp_0"},
            {"input": [{"type": "item_reference", "id": "msg_0"}]},
        ):
            answered = client.post(path, json={"model": "m", "input": "Hi", **refers})
            assert answered.status_code == 400, answered.text
        assert cloud.posts() == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_forwarded_error_about_a_long_prompt_says_so_once(front: Front, path: str) -> None:
    said = "prompt is too long: this model's maximum context length is 64 tokens, not 99; shorten it"
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": said}}
    with server({path: ["model"]}, reply("400 Bad Request", error)) as cloud:
        body = {"model": "m", "messages": HELLO, "max_tokens": 9}
        assert front(cloud).post(path, json=body).json() == error
        assert len(cloud.posts(path)) == 1


@pytest.fixture
def keyed(tmp_path: Path) -> AppOptions:
    for name, more in (("alice", {}), ("bob", {"models": ("other",)}), ("eve", {"priority": 7})):
        key = Key(name, hashed(name), **more)  # type: ignore[arg-type]
        add_key(tmp_path / "keys.json", key)
    return AppOptions(keys=KeyStore(tmp_path / "keys.json"))


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_tenants_are_kept_apart_on_forwarded_paths(front: Front, keyed: AppOptions) -> None:
    whole = reply("200 OK", {"model": "m", "usage": {"input_tokens": 2, "output_tokens": 3}})
    listed = {"/v1/responses": SALTED, "/v1/messages": ["model"], "/v1/rerank": ["model", "priority"]}
    with server(listed, whole) as cloud:
        client = front(cloud, app=keyed, priorities=True)
        body = {"model": "m", "input": "Hi", "store": False, "cache_salt": "mine"}
        for name in ("alice", "eve"):
            assert client.post("/v1/responses", json=body, headers=bearer(name)).status_code == 200
        first, second = cloud.posts("/v1/responses")
        assert first["cache_salt"] not in ("mine", second["cache_salt"])
        assert (first.get("priority"), second.get("priority")) == (None, 7)
        # Messages have no salt there: they are answered through chat completions, which have one.
        said = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        client.post("/v1/messages", json=said, headers=bearer("alice"))
        assert cloud.posts("/v1/messages") == []
        assert cloud.posts("/v1/chat/completions")[0]["cache_salt"]
        ranked = {"model": "m", "query": "q", "documents": ["a"]}
        assert client.post("/v1/rerank", json=ranked, headers=bearer("bob")).status_code == 404
        assert client.post("/v1/rerank", json=ranked).status_code == 401
        urgent = client.post("/v1/rerank", json=ranked | {"priority": 6}, headers=bearer("eve"))
        assert urgent.status_code == 403
        assert cloud.posts("/v1/rerank") == []


@pytest.mark.parametrize("wrong", [
    b"[]", b"3", b"{", b'{"model": 3}', b'{"model": ["m"]}', b'{"model": "m", "priority": true}',
    b'{"model": "m", "priority": 1e3}', b'{"model": "m", "cache_salt": 3}', b"[" * 5000,
    b'{"model": "m", "x": NaN}', b'{"model": "m", "x": "\\ud800"}', b"\xff", b"",
    b'{"model": "' + b"m" * 999 + b'"}',
])  # fmt: skip
def test_wrong_bodies_reach_no_server(front: Front, wrong: bytes) -> None:
    with server({"/v1/rerank": ["model"]}, reply("200 OK", {})) as cloud:
        client = front(cloud)
        answered = client.post("/v1/rerank", content=wrong, headers={"Content-Type": "application/json"})
        assert answered.status_code in (400, 404)
        assert answered.json()["error"]["message"]
        assert cloud.posts() == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (reply("422 No", {"error": {"message": "bad n", "type": "t", "code": "c", "param": "n"}}), 422),
        (reply("500 No", {"error": {"message": "secret"}}), 503),
        (reply("401 No", {"error": {"message": "secret"}}), 503),
        (b"secret", 503),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nContent-Type: application/json\r\n\r\n{", 503),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", 503),
    ],
)
def test_failures_are_told_without_words_of_the_server(front: Front, answer: bytes, status: int) -> None:
    with server({"/v1/rerank": ["model"]}, answer) as cloud:
        answered = front(cloud).post("/v1/rerank", json={"model": "m"})
    assert answered.status_code == status
    assert "secret" not in answered.text
    assert "location" not in answered.headers
    if status == 422:
        assert answered.json()["error"]["code"] == "c"


def form(model: bytes, boundary: str = "x", more: bytes = b"") -> bytes:
    mark = f"--{boundary}".encode()
    sound = (
        b'\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--y\x00\xff\r\n'
    )
    named = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n' + model + b"\r\n"
    return mark + sound + mark + named + more + mark + b"--\r\n"


def test_sound_is_forwarded_with_the_model_renamed(front: Front) -> None:
    data = form(b"ours")
    found = read_form(data, "multipart/form-data; boundary=x")
    assert found.model == "ours"
    assert found.renamed("theirs").data == form(b"theirs")
    heard = {"text": "hi", "usage": {"type": "duration", "seconds": 1}}
    with server({"/v1/audio/transcriptions": []}, reply("200 OK", heard)) as cloud:
        client = front(cloud, ("ours",))
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        answered = client.post("/v1/audio/transcriptions", content=data, headers=kind)
        assert (answered.status_code, answered.json()) == (200, heard)
        assert cloud.posts("/v1/audio/transcriptions") == [{"form": form(b"m")}]  # all bytes of the sound
        files = {"file": ("a.wav", b"\x00\xff" * 99)}
        wrong = client.post("/v1/audio/transcriptions", files=files, data={"model": "other"})
        assert wrong.status_code == 404
        assert client.post("/v1/audio/transcriptions", files=files).status_code == 400
        assert client.post("/v1/audio/transcriptions", json={"model": "ours"}).status_code == 400


@pytest.mark.parametrize("first", ["503 Service Unavailable", "429 Too Many Requests"])
def test_a_description_that_could_not_be_read_is_read_again(front: Front, first: str) -> None:
    """A server that starts may list its models before it describes its paths."""
    read: list[str] = []

    def answered(path: str, body: Json) -> Iterator[bytes]:
        if path == "/v1/models":
            yield listing("m")
        elif path == "/openapi.json":
            read.append(path)
            yield (
                reply(first, {}) if len(read) == 1 else reply("200 OK", described({"/v1/rerank": ["model"]}))
            )
        else:
            yield reply("200 OK", RANKED)

    with Cloud(answered) as cloud:
        client = front(cloud, probe_seconds=0.05)
        body = {"model": "m", "query": "q", "documents": ["a"]}
        for _ in range(200):
            if (answer := client.post("/v1/rerank", json=body)).is_success:
                break
            time.sleep(0.02)
        assert answer.json() == RANKED
        assert len(read) == 2


def test_a_server_without_a_description_is_asked_for_chats_alone(front: Front) -> None:
    with Cloud(chatting("Hi.")) as cloud:
        client = front(cloud)
        body = {"model": "m", "input": "Hi", "store": False}
        answered = client.post("/v1/responses", json=body)
        assert answered.json()["output"][0]["content"][0]["text"] == "Hi."
        data = {"Content-Type": "multipart/form-data; boundary=x"}
        assert client.post("/v1/audio/transcriptions", content=form(b"m"), headers=data).status_code == 404
        assert {path for path, _ in cloud.asked} <= {"/v1/models", "/openapi.json", "/v1/chat/completions"}


TWICE = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n'


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (form(b"m", more=TWICE), "multipart/form-data; boundary=x"),
        (form(b""), "multipart/form-data; boundary=x"),
        (form(b"\xff"), "multipart/form-data; boundary=x"),
        (form(b"m"), "multipart/form-data"),
        (form(b"m"), "multipart/form-data; boundary=x\r\nEvil: 1"),
        (form(b"m"), "application/json"),
        (b"--x\r\n\r\n" * 999, "multipart/form-data; boundary=x"),
    ],
)
def test_what_is_no_form_of_one_model(data: bytes, kind: str) -> None:
    with pytest.raises(RequestError):
        read_form(data, kind)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_any_bytes_are_a_form_or_refused(data: bytes, value: bytes) -> None:
    for text in (data, form(value, more=data), data + form(value)):
        try:
            found = read_form(text, "multipart/form-data; boundary=x")
        except RequestError:
            continue
        assert found.data[found.at :].startswith(found.model.encode())


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["paths", "/v1/rerank", "post", "requestBody", "$ref", "schema", "anyOf", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["paths", "components"]), JSONS))
def test_any_description_is_read_or_refused(record: Json) -> None:
    try:
        found = listed_paths(record, NATIVE)
    except ShapeError:
        return
    assert set(found) <= set(NATIVE)


def test_a_description_that_refers_to_itself_ends() -> None:
    schema: Json = {"$ref": "#/components/schemas/A"}
    post = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    record = {"paths": {"/v1/rerank": post}, "components": {"schemas": {"A": {"anyOf": [schema, schema]}}}}
    assert listed_paths(json.loads(json.dumps(record)), NATIVE)["/v1/rerank"].fields == frozenset()
