"""What a front forwards unchanged: fields, parts, events, whole answers, rejections, priorities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from tests.support.clouds import DONE, STREAM, Cloud, Json, chatting, reply
from tests.support.fronts import opened_fronts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Front = Callable[..., httpx.Client]


@pytest.fixture
def front() -> Iterator[Front]:
    """Makes a front of a cloud, and gives a client of it."""
    with opened_fronts() as fronts:
        yield lambda *given, **more: fronts(*given, **more)[1]


def chat(**more: Any) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **more}


def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return {
        "id": "theirs",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [choice],
        "system_fingerprint": "fp",
    }


def written(*records: Json) -> list[bytes]:
    """Events with blanks that none of our encoders would write."""
    return [
        b"data: " + json.dumps(record, separators=(" , ", " : ")).encode() + b"\n\n" for record in records
    ]


STREAMED = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm", "reasoning_details": [{"type": "text", "text": "hm"}]}),
    chunk({"content": "Hi"}, stop_reason=None),
    chunk({"content": " you", "audio": {"data": "QQ"}}),
    chunk({}, "eos_by_name", stop_reason="</s>"),
]
USAGE = {
    "id": "theirs",
    "object": "chat.completion.chunk",
    "created": 7,
    "model": "m",
    "choices": [],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}


def streaming(_: Json) -> Iterator[bytes]:
    yield STREAM + b"".join(written(*STREAMED, USAGE)) + DONE


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_of_an_untouched_model_has_the_bytes_of_its_server(front: Front, usage: bool) -> None:
    with Cloud(chatting(completions=streaming)) as cloud:
        options = {"stream_options": {"include_usage": True}} if usage else {}
        answered = front(cloud).post(CHAT, json=chat(stream=True, **options))
    expected = written(*STREAMED, *([USAGE] if usage else []))
    assert answered.content == b"".join(expected) + b"data: [DONE]\n\n"


def test_a_stream_of_a_renamed_model_differs_in_its_name_only(front: Front) -> None:
    with Cloud(chatting(completions=streaming)) as cloud:
        answered = front(cloud, ("ours",)).post(CHAT, json=chat(stream=True) | {"model": "ours"})
    lines = [json.loads(line[6:]) for line in answered.text.split("\n\n") if line.startswith("data: {")]
    assert lines == [{**record, "model": "ours"} for record in STREAMED]
    assert cloud.posts(CHAT)[0]["model"] == "m"


def test_a_whole_answer_has_all_fields_of_its_stream(front: Front) -> None:
    with Cloud(chatting(completions=streaming)) as cloud:
        answered = front(cloud, ("ours",)).post(CHAT, json=chat() | {"model": "ours"}).json()
    assert answered == {
        "id": "theirs",
        "object": "chat.completion",
        "created": 7,
        "model": "ours",
        "system_fingerprint": "fp",
        "usage": USAGE["usage"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "eos_by_name",
                "stop_reason": "</s>",
                "logprobs": None,
                "message": {
                    "role": "assistant",
                    "content": "Hi you",
                    "refusal": None,
                    "reasoning": "hm",
                    "audio": {"data": "QQ"},
                    "reasoning_details": [{"type": "text", "text": "hm"}],
                },
            }
        ],
    }


def test_calls_that_come_in_parts_are_whole_in_a_whole_answer(front: Front) -> None:
    def calls(_: Json) -> Iterator[bytes]:
        first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
        deltas: list[Json] = [
            {"role": "assistant", "content": None, "tool_calls": [first]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
            {
                "tool_calls": [
                    {
                        "index": 1,
                        "id": "c2",
                        "type": "function",
                        "extra": 1,
                        "function": {"name": "g", "arguments": "{}"},
                    }
                ]
            },
            {"tool_calls": [{"index": 0, "function": {"name": "", "arguments": " 1}"}}]},
        ]
        yield STREAM + b"".join(written(*map(chunk, deltas), chunk({}, "tool_calls"))) + DONE

    with Cloud(chatting(completions=calls)) as cloud:
        message = front(cloud).post(CHAT, json=chat()).json()["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "extra": 1, "function": {"name": "g", "arguments": "{}"}},
        ],
    }


FORMS: list[Json] = [
    {
        "tools": [{"type": "custom", "custom": {"name": "x"}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto"},
    },
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"chat_template_kwargs": {"deep": {"er": [1, {"a": 2}]}}},
    {
        "mm_processor_kwargs": {"fps": 1},
        "documents": [{"text": "x"}],
        "bad_words": ["no"],
        "vllm_xargs": {"a": 1},
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what?"},
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"},
                        "uuid": "u",
                    },
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    {"type": "file", "file": {"file_data": "AAAA"}},
                ],
            }
        ]
    },
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_what_only_the_upstream_knows_reaches_it(front: Front, form: Json) -> None:
    with Cloud(chatting(completions=streaming)) as cloud:
        assert front(cloud).post(CHAT, json=chat() | form).status_code == 200
        sent = cloud.posts(CHAT)[0]
    assert {name: sent[name] for name in form} == form


def test_token_ids_of_an_upstream_are_passed_on(front: Front) -> None:
    begun = {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [5, 6]}
    parts = [chunk({"content": "Hi"}, token_ids=[7]), chunk({}, token_ids=[8, 9]), chunk({}, "stop")]
    events = written(begun, *({**part, "prompt_token_ids": None} for part in parts))
    with Cloud(chatting(completions=lambda _: iter([STREAM, *events, DONE]))) as cloud:
        client = front(cloud)
        streamed = client.post(CHAT, json=chat(stream=True, return_token_ids=True))
        whole = client.post(CHAT, json=chat(return_token_ids=True)).json()
        assert [sent["return_token_ids"] for sent in cloud.posts(CHAT)] == [True, True]
    assert streamed.content == b"".join(events) + b"data: [DONE]\n\n"
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([5, 6], [7, 8, 9])


@pytest.mark.parametrize("most", [1, 0])
def test_what_servers_do_not_stream_is_asked_for_whole(front: Front, most: int) -> None:
    whole = {
        "id": "w",
        "object": "chat.completion",
        "model": "m",
        "prompt_logprobs": [None, {"5": {"logprob": -1}}],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
    with Cloud(chatting(completions=lambda _: iter([reply("200 OK", whole)]))) as cloud:
        client = front(cloud)
        assert client.post(CHAT, json=chat(prompt_logprobs=most)).json() == whole
        assert cloud.posts(CHAT)[0]["stream"] is False
        assert 'generation_tokens_total{model_name="m"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, {"message": "no", "type": "BadRequestError", "param": "n", "code": "bad_n"}),
        (422, {"message": "no such shape", "type": "invalid_request_error", "param": None, "code": "shape"}),
        (413, {"message": "too large", "type": "too_large", "param": None, "code": "too_large"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_status_type_and_code(front: Front, status: int, error: Json, stream: bool) -> None:
    with Cloud(chatting(completions=lambda _: iter([reply(f"{status} No", {"error": error})]))) as cloud:
        answered = front(cloud).post(CHAT, json=chat(stream=stream))
    assert (answered.status_code, answered.json()["error"]) == (status, error)


IMAGE = "data:image/png;base64,AAAA"
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGES: dict[str, tuple[Json, str]] = {
    "/v1/messages": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}], "max_tokens": 9},
        "messages: only parts of type 'text' are taken, not 'image'",
    ),
    "/v1/responses": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
        "input: only parts of type 'text' are taken, not 'input_image'",
    ),
    CHAT: (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        "messages.0.content.0: only parts of type 'text' are taken, not 'image_url'",
    ),
}


@pytest.mark.parametrize("path", IMAGES)
def test_a_refused_image_has_the_clients_name(front: Front, path: str) -> None:
    body, said = IMAGES[path]
    message = "messages.0.content.0: only parts of type 'text' are taken, not 'image_url'"
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": None}
    with Cloud(chatting(completions=lambda _: iter([reply("400 No", {"error": error})]))) as cloud:
        answered = front(cloud).post(path, json={"model": "m", **body})
        assert len(cloud.posts(CHAT)) == 1
    assert answered.status_code == 400
    assert answered.json()["error"]["message"] == said


def test_an_error_after_events_that_came_with_it_follows_them(front: Front) -> None:
    def failing(_: Json) -> Iterator[bytes]:
        yield STREAM + b"".join(
            written(*STREAMED[:3], {"error": {"message": "secret", "type": "server_error"}})
        )

    with Cloud(chatting(completions=failing)) as cloud:
        answered = front(cloud).post(CHAT, json=chat(stream=True))
    *events, last, rest = answered.content.split(b"\n\n")
    assert [each + b"\n\n" for each in events] == written(*STREAMED[:3])
    assert json.loads(last[6:])["error"]["message"] == "the upstream server failed during the answer"
    assert rest == b""


def test_events_without_a_part_wait_so_that_another_server_can_be_asked(front: Front) -> None:
    asked: list[int] = []

    def second(_: Json) -> Iterator[bytes]:
        asked.append(1)
        if len(asked) == 1:
            yield STREAM + b"".join(written(STREAMED[0]))
        else:
            yield from streaming(_)

    with Cloud(chatting(completions=second)) as cloud:
        answered = front(cloud).post(CHAT, json=chat(stream=True))
    assert answered.status_code == 503
    assert "server is available" in answered.json()["error"]["message"]


@pytest.mark.parametrize(("takes", "sent"), [(True, 5), (False, None)])
def test_a_tenants_priority_reaches_a_server_that_takes_it(
    front: Front, tmp_path: Path, takes: bool, sent: int | None
) -> None:
    add_key(tmp_path / "keys.json", Key("alice", hashed("secret"), priority=5))
    app = AppOptions(keys=KeyStore(tmp_path / "keys.json"))
    with Cloud(chatting(completions=streaming)) as cloud:
        client = front(cloud, app=app, priorities=takes)
        headers = {"Authorization": "Bearer secret"}
        assert client.post(CHAT, json=chat(), headers=headers).status_code == 200
        assert client.post(CHAT, json=chat(priority=4), headers=headers).status_code == 403
    assert cloud.posts(CHAT)[0].get("priority") == sent


def test_a_field_that_only_the_server_knows_has_any_value_under_the_name_of_another_paths_field(
    front: Front,
) -> None:
    vector = {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}}

    def embedding(_: Json) -> Iterator[bytes]:
        yield reply("200 OK", vector)

    with Cloud(chatting(embeddings=embedding)) as cloud:
        body = {"model": "m", "input": "Hi", "messages": [None, [1]]}
        assert front(cloud).post("/v1/embeddings", json=body).status_code == 200
        assert cloud.posts("/v1/embeddings")[0]["messages"] == [None, [1]]
