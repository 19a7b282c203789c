"""A front names the fields that its upstream ignored, and those that it leaves out itself; a strict front
rejects unknown fields before it passes a request on.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from nearfar.fallback_server.http.app import AppOptions
from tests.support.clouds import DONE, STREAM, Cloud, Json, described, listing, reply, said
from tests.support.fronts import opened_fronts

HEADER = "x-nearfar-ignored"
THEIRS = "X-Nearfar-Ignored: repeat_penalty, messages.id, and 3 more"
NAMING = STREAM.replace(b"\r\n\r\n", f"\r\n{THEIRS}\r\n\r\n".encode())
HELLO = [{"role": "user", "content": "Hello"}]
SEARCH = {"type": "web_search"}
CHAT, COMPLETIONS, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
FORWARDED = "/v1/rerank"
ASKED: dict[str, Json] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    VECTORS: {"input": "Hello"},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 9},
    OLLAMA: {"messages": HELLO},
    FORWARDED: {"query": "q", "documents": ["a"]},
}


def answer(path: str, body: Json) -> Iterator[bytes]:
    """A model whose server lists /v1/rerank, and names ignored fields."""
    if path == "/v1/models":
        yield listing("m")
    elif path == "/openapi.json":
        yield reply("200 OK", described({"/v1/rerank": ["model", "query"]}))
    elif path == FORWARDED:
        yield reply("200 OK", {"results": [], "usage": {"total_tokens": 3}}, THEIRS)
    elif path == VECTORS:
        vector = {"index": 0, "embedding": [1.0]}
        yield reply("200 OK", {"data": [vector], "usage": {"prompt_tokens": 3}}, THEIRS)
    elif path == COMPLETIONS:
        yield NAMING + b'data: {"choices":[{"index":0,"text":"Hi","finish_reason":"stop"}]}\n\n' + DONE
    else:
        yield NAMING + said("Hi") + said(finish="stop") + DONE


@pytest.fixture(scope="module")
def fronts() -> Iterator[tuple[httpx.Client, httpx.Client, Cloud]]:
    """A front, a strict front, and the cloud behind both."""
    with opened_fronts() as made, Cloud(answer) as cloud:
        strict = AppOptions(strict_fields=True)
        yield made(cloud, key=None)[1], made(cloud, app=strict, key=None)[1], cloud


Fronts = tuple[httpx.Client, httpx.Client, Cloud]


@pytest.mark.parametrize("path", ASKED)
def test_what_the_upstream_ignored_is_named(fronts: Fronts, path: str) -> None:
    for stream in (False, True) if path not in (FORWARDED, VECTORS) else (False,):
        answered = fronts[0].post(path, json={"model": "m", "stream": stream, **ASKED[path]})
        assert answered.status_code == 200, answered.text
        assert answered.headers[HEADER] == "repeat_penalty, messages.id, and 3 more"


@pytest.mark.parametrize(
    ("path", "more", "own"),
    [
        (RESPONSES, {"tools": [SEARCH], "mood": "x"}, "mood, tools.web_search"),
        (MESSAGES, {"tools": [SEARCH], "mood": "x"}, "mood, tools.web_search"),
        (OLLAMA, {"mood": "x"}, "mood"),
    ],
)
def test_what_the_front_leaves_out_itself_is_named_first(
    fronts: Fronts, path: str, more: Json, own: str
) -> None:
    answered = fronts[0].post(path, json={"model": "m", **ASKED[path], **more})
    assert answered.status_code == 200, answered.text
    assert answered.headers[HEADER] == f"{own}, repeat_penalty, messages.id, and 3 more"


def test_names_that_an_upstream_escaped_are_not_escaped_again() -> None:
    """A field that the front ignores, too, is named once."""
    theirs = r"X-Nearfar-Ignored: '\xe9\U0001f642', 'a b', zz"

    def answering(path: str, body: Json) -> Iterator[bytes]:
        if path == "/v1/models":
            yield listing("m")
        else:
            head = STREAM.replace(b"\r\n\r\n", f"\r\n{theirs}\r\n\r\n".encode())
            yield head + said("Hi") + said(finish="stop") + DONE

    with opened_fronts() as made, Cloud(answering) as cloud:
        body = {"model": "m", **ASKED[OLLAMA], "é🙂": 1}
        answered = made(cloud, key=None)[1].post(OLLAMA, json=body)
    assert answered.headers[HEADER] == r"'\xe9\U0001f642', 'a b', zz"


EFFORTS: dict[str, tuple[Json, str]] = {
    CHAT: ({"reasoning_effort": "low"}, "reasoning_effort"),
    RESPONSES: ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    MESSAGES: ({"output_config": {"effort": "low"}}, "output_config.effort"),
}


@pytest.mark.parametrize("strict", [False, True])
def test_an_effort_that_the_upstream_ignored_has_the_clients_name(strict: bool) -> None:
    """A strict front cannot know what the upstream's template follows: it passes the field on, and says that
    the upstream ignored it.
    """

    def answering(path: str, body: Json) -> Iterator[bytes]:
        if path == "/v1/models":
            yield listing("m")
        else:
            assert body["reasoning_effort"] == "low"
            head = STREAM.replace(b"\r\n\r\n", b"\r\nX-Nearfar-Ignored: reasoning_effort\r\n\r\n")
            yield head + said("Hi") + said(finish="stop") + DONE

    with opened_fronts() as made, Cloud(answering) as cloud:
        client = made(cloud, app=AppOptions(strict_fields=strict), key=None)[1]
        for path, (effort, name) in EFFORTS.items():
            answered = client.post(path, json={"model": "m", **ASKED[path], **effort})
            assert (answered.status_code, answered.headers[HEADER]) == (200, name)


def test_a_strict_front_passes_on_what_only_an_upstream_follows(fronts: Fronts) -> None:
    form: Json = {"prediction": {"type": "content", "content": "x"}, "guided_decoding_backend": "outlines"}
    answered = fronts[1].post(CHAT, json={"model": "m", **ASKED[CHAT], **form})
    assert answered.status_code == 200, answered.text
    sent = fronts[2].posts(CHAT)[-1]
    assert {name: sent[name] for name in form} == form
    refused = fronts[1].post(CHAT, json={"model": "m", **ASKED[CHAT], "zz": None})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "zz")


def test_a_field_that_reaches_the_upstream_is_not_named_by_the_front(fronts: Fronts) -> None:
    answered = fronts[0].post(CHAT, json={"model": "m", **ASKED[CHAT], "mood": "x", "user": {"name": "Ann"}})
    assert answered.headers[HEADER] == "repeat_penalty, messages.id, and 3 more"
    assert fronts[2].posts(CHAT)[-1]["mood"] == "x"


@pytest.mark.parametrize("path", ASKED)
def test_a_strict_front_rejects_unknown_fields(fronts: Fronts, path: str) -> None:
    _, client, cloud = fronts
    before = len(cloud.posts())
    refused = client.post(path, json={"model": "m", **ASKED[path], "mood": "x"})
    assert refused.status_code == 400, refused.text
    assert "mood" in refused.text
    assert len(cloud.posts()) == before
    answered = client.post(path, json={"model": "m", **ASKED[path]})
    assert answered.status_code == 200, answered.text
    assert answered.headers[HEADER] == "repeat_penalty, messages.id, and 3 more"


FUNCTION: Json = {"name": "f", "parameters": {"type": "object"}}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MANY = dict.fromkeys(map(str, range(99)), 1)
NESTED: dict[str, Json] = {
    "tools.0.zz": {"tools": [{"type": "function", "function": FUNCTION, "zz": 1}]},
    "tools.0.function.zz": {"tools": [{"type": "function", "function": {**FUNCTION, "zz": 1}}]},
    "tools.0.custom": {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    "tool_choice.zz": {"tool_choice": {"type": "function", "function": {"name": "f"}, "zz": 1}},
    "tool_choice.function.zz": {"tool_choice": {"type": "function", "function": {"name": "f", "zz": 1}}},
    "response_format.zz": {"response_format": {"type": "json_object", "zz": 1}},
    "response_format.json_schema.zz": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "zz": 1}}
    },
    "structured_outputs.zz": {"structured_outputs": {"regex": "a", "zz": 1}},
    "messages.1.tool_calls.0.zz": {
        "messages": [*HELLO, {"role": "assistant", "tool_calls": [{**CALL, "zz": 1}]}]
    },
    "tools.0": {"tools": [{"type": "function", "function": FUNCTION, **MANY}]},
}


@pytest.mark.parametrize("place", NESTED)
def test_a_strict_front_rejects_nested_unknown_fields(fronts: Fronts, place: str) -> None:
    passing, client, cloud = fronts
    body = {"model": "m", **ASKED[CHAT], **NESTED[place]}
    before = len(cloud.posts())
    refused = client.post(CHAT, json=body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == place.split(".")[0]
    assert error["message"].startswith(("unknown field ", f"{place}: 101 fields"))
    assert len(cloud.posts()) == before
    assert passing.post(CHAT, json=body).status_code == 200


def test_a_strict_front_passes_known_fields_with_forms_of_the_upstream(fronts: Fronts) -> None:
    form = {"chat_template_kwargs": {"deep": {"er": [1]}}, "bad_words": ["no"]}
    answered = fronts[1].post(CHAT, json={"model": "m", **ASKED[CHAT], **form})
    assert answered.status_code == 200, answered.text
    sent = fronts[2].posts(CHAT)[-1]
    assert {name: sent[name] for name in form} == form


def test_what_no_upstream_is_asked_for_is_refused(fronts: Fronts) -> None:
    """A response that the front answers itself is refused where it cannot be followed."""
    refused = fronts[0].post(RESPONSES, json={"model": "m", **ASKED[RESPONSES], "background": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
