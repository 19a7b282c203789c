"""The server over the tiny model, called by the official openai client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.fallback_server.grammars import service
from nearfar.version import __version__
from tests.support.late import late
from tests.support.servers import MODEL, RunningServer, tiny_engine
from tests.unit.test_api import OFFSETS

openai = late("openai")

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
TIME: Any = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    made = RunningServer(lambda: tiny_engine(directory))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


def idle(server: RunningServer) -> bool:
    stats = server.engine.stats()
    return stats.running == 0 and stats.waiting == 0


def test_chat_whole_and_streamed_are_the_same_text(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(messages=HELLO, max_tokens=20, **GREEDY)
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (9, 20, 29)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, max_tokens=20, stream=True, stream_options=options, **GREEDY
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == made.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_many_asynchronous_streams_give_what_each_gives_alone(
    client: openai.OpenAI, server: Any
) -> None:
    prompts = [f"Prompt number {n}" for n in range(6)]
    alone = [client.completions.create(prompt=p, max_tokens=12, **GREEDY).choices[0].text for p in prompts]
    async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none") as asynchronous:

        async def ask(prompt: str) -> str:
            stream = await asynchronous.completions.create(
                prompt=prompt, max_tokens=12, stream=True, **GREEDY
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*(ask(prompt) for prompt in prompts)) == alone


def test_several_choices_and_prompts_and_seeds(client: openai.OpenAI) -> None:
    both: Any = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 8, "seed": 5}
    first, second = client.completions.create(**both), client.completions.create(**both)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text
    assert first.usage is not None
    assert first.usage.completion_tokens == 32


def test_token_prompts_echo_and_logprobs(client: openai.OpenAI) -> None:
    made = client.completions.create(prompt=[72, 105], max_tokens=4, logprobs=3, **GREEDY)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.top_logprobs is not None
    assert len(found.tokens or []) == len(found.top_logprobs) == 4
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    echoed = client.completions.create(prompt="Hello", echo=True, max_tokens=4, **GREEDY)
    alone = client.completions.create(prompt="Hello", max_tokens=4, **GREEDY)
    assert echoed.choices[0].text == "Hello" + alone.choices[0].text
    only = client.completions.create(prompt="Hello", echo=True, max_tokens=0, **GREEDY)
    assert only.choices[0].text == "Hello"


def test_a_prompts_tokens_have_the_log_probabilities_that_they_were_generated_with(
    client: openai.OpenAI,
) -> None:
    """As evaluations score a text: they take the likeliest tokens, too. Nothing of it counts as cached."""
    asked: Any = {"logprobs": 2, **GREEDY}
    prompt, ids = [256, *range(60, 100)], {"return_token_ids": True}
    made: Any = client.completions.create(prompt=prompt, max_tokens=30, **asked, extra_body=ids).choices[0]
    asked["echo"] = True
    whole: Any = client.completions.create(prompt=prompt + made.token_ids, max_tokens=0, **asked)
    found, answer = whole.choices[0].logprobs, made.logprobs
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    assert len(found.tokens) == 71
    assert found.token_logprobs[-30:] == pytest.approx(answer.token_logprobs, abs=1e-4)
    for top, known in zip(found.top_logprobs[-30:], answer.top_logprobs, strict=True):
        assert top == pytest.approx(known, abs=1e-4)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    both: Any = client.completions.create(prompt=prompt, max_tokens=30, **asked).choices[0].logprobs
    assert both.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-4)
    alone: Any = client.completions.create(prompt=[72], max_tokens=1, **asked).choices[0].logprobs
    assert (len(alone.tokens), alone.token_logprobs[0]) == (2, None)


def test_prompt_logprobs_in_vllms_shape(client: openai.OpenAI) -> None:
    """The prompt's own token comes first, also where others are likelier; a chat has them once."""
    ids: Any = {"return_token_ids": True, "prompt_logprobs": 3}
    many: Any = client.completions.create(prompt=["Hello", "Ho"], max_tokens=1, **GREEDY, extra_body=ids)
    once: Any = client.chat.completions.create(messages=HELLO, max_tokens=1, n=2, **GREEDY, extra_body=ids)
    assert not any(hasattr(choice, "prompt_logprobs") for choice in once.choices)
    for made in (*many.choices, once):
        first, *rest = made.prompt_logprobs
        assert first is None
        assert [int(next(iter(entry))) for entry in rest] == made.prompt_token_ids[1:]
        for entry in rest:
            own, *others = entry.values()
            ranked = {one["rank"]: one["logprob"] for one in entry.values() if one["rank"]}
            assert [ranked[at] for at in (1, 2, 3)] == sorted(ranked.values(), reverse=True)
            assert own["rank"] or own["logprob"] <= others[-1]["logprob"]
    echoed: Any = client.completions.create(
        prompt="Hello", echo=True, max_tokens=0, logprobs=0, **GREEDY, extra_body=ids
    )
    own = [next(iter(entry.values())) for entry in echoed.choices[0].prompt_logprobs[1:]]
    assert echoed.choices[0].logprobs.token_logprobs[1:] == [one["logprob"] for one in own]
    assert [len(top) for top in echoed.choices[0].logprobs.top_logprobs[1:]] == [1] * len(own)
    with pytest.raises(openai.BadRequestError, match="not streamed") as refused:
        client.completions.create(prompt="Hello", stream=True, **GREEDY, extra_body=ids)
    assert refused.value.param == "prompt_logprobs"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert made.choices[0].logprobs is not None
    content = made.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 3
    assert all(
        item.logprob == item.top_logprobs[0].logprob and len(item.top_logprobs) == 2 for item in content
    )


def test_token_ids_are_those_of_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    """The ids of a chat's answer include a stop string's; names of alternatives are ids, too."""
    ids: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked: Any = {"messages": HELLO, "max_tokens": 8, **GREEDY}
    made: Any = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, extra_body=ids)
    known = httpx.post(f"{server.address}/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert made.prompt_token_ids == known
    choice = made.choices[0]
    text = httpx.post(f"{server.address}/detokenize", json={"tokens": choice.token_ids}).json()["prompt"]
    assert text == choice.message.content
    content = choice.logprobs.content
    assert [item.token for item in content] == [f"token_id:{token}" for token in choice.token_ids]
    assert all(item.top_logprobs[0].token == item.token for item in content)
    assert all(re.fullmatch(r"token_id:\d+", other.token) for item in content for other in item.top_logprobs)
    stop = text[2:4]
    cut: Any = client.chat.completions.create(**asked, stop=stop, extra_body=ids)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].token_ids == choice.token_ids[: text.index(stop) + len(stop)]


def test_stop_strings_bias_and_stop_tokens(client: openai.OpenAI) -> None:
    base: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "temperature": 0.9, "seed": 3}
    whole = client.completions.create(**base).choices[0].text
    stop = whole[10:13]
    made = client.completions.create(**base, stop=[stop]).choices[0]
    assert made.text == whole[: whole.find(stop)]
    assert made.finish_reason == "stop"
    biased = client.completions.create(**base, logit_bias={"65": 100}).choices[0].text
    assert len(set(biased)) == 1
    ended = client.completions.create(**base, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].text == ""


def test_min_tokens_hold_the_end_token_back(client: openai.OpenAI) -> None:
    base: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 9, "logit_bias": {"257": 100}}
    assert client.completions.create(**base).usage.completion_tokens == 1
    assert client.completions.create(**base, extra_body={"min_tokens": 5}).usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("regex", "more", "whole", "reason"),
    [
        ("a*", {"ignore_eos": True}, "aaaaa", "length"),
        ("a?", {"ignore_eos": True}, "a", "stop"),
        ("a*", {"min_tokens": 3}, "aaa", "stop"),
        ("a?", {"min_tokens": 4}, "a", "stop"),
        ("a{2}", {"min_tokens": 4, "ignore_eos": True}, "aa", "stop"),
        ("a*", {}, "", "stop"),
    ],
)
def test_the_grammar_wins_over_ignore_eos_and_min_tokens(
    client: openai.OpenAI, regex: str, more: dict[str, Any], whole: str, reason: str, chat: bool, stream: bool
) -> None:
    params: Any = {
        "model": MODEL, "max_tokens": 5, "temperature": 0, "logit_bias": {"257": 100}, "stream": stream,
        "extra_body": {"response_format": {"type": "regex", "regex": regex}, **more},
    }  # fmt: skip
    created = client.chat.completions.create(messages=HELLO, **params) if chat else (
        client.completions.create(prompt="Hello", **params)
    )  # fmt: skip
    text, ended = "", None
    for answer in created if stream else [created]:
        choice = answer.choices[0]
        said = (choice.delta if stream else choice.message).content if chat else choice.text
        text, ended = text + (said or ""), choice.finish_reason
    assert (text, ended) == (whole, reason)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_does_not_fit_is_told_in_openais_code_and_words(
    client: openai.OpenAI, chat: bool
) -> None:
    create: Any = client.chat.completions.create if chat else client.completions.create
    asked = {"messages": [{"role": "user", "content": "a" * 5000}]} if chat else {"prompt": "a" * 5000}
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as refused:
        create(model=MODEL, **asked)
    assert (refused.value.code, refused.value.param) == (
        "context_length_exceeded", "messages" if chat else "prompt",
    )  # fmt: skip


@pytest.mark.parametrize(("text", "offsets"), OFFSETS)
@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_count_characters(
    client: openai.OpenAI, text: str, offsets: list[int], stream: bool
) -> None:
    extra = {"response_format": {"type": "regex", "regex": text}}
    made: Any = client.completions.create(
        model=MODEL, prompt="a", logprobs=0, temperature=0, extra_body=extra, stream=stream
    )
    told = [one.choices[0].logprobs for one in (made if stream else [made]) if one.choices[0].logprobs]
    assert [at for one in told for at in one.text_offset] == offsets


def test_json_schema_json_object_regex_and_grammar(client: openai.OpenAI) -> None:
    base: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 150, "seed": 1}
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    pet = json.loads(
        client.chat.completions.create(**base, response_format=form).choices[0].message.content or ""
    )
    assert pet["kind"] in ("cat", "dog")
    assert 0 <= pet["age"] <= 9
    free = client.chat.completions.create(**base, response_format={"type": "json_object"}).choices[0]
    assert (free.message.content or "").startswith("{")
    regex: Any = {"response_format": {"type": "regex", "regex": "(yes|no){3}"}}
    assert re.fullmatch(
        "(yes|no){3}", client.chat.completions.create(**base, extra_body=regex).choices[0].message.content
    )
    grammar: Any = {"response_format": {"type": "grammar", "grammar": 'root ::= "a" root | "b"'}}
    made = client.chat.completions.create(**base, extra_body=grammar, logit_bias={"64": 1}).choices[0]
    assert re.fullmatch("a*b?", made.message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools_that_must_be_called(client: openai.OpenAI, choice: Any) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice=choice, max_tokens=400, seed=2,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert made.choices[0].finish_reason == "tool_calls"
    calls = made.choices[0].message.tool_calls
    assert calls
    call: Any = calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["kind"] in ("cat", "dog")
    assert made.choices[0].message.content is None
    history: list[Any] = [
        *HELLO,
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = client.chat.completions.create(
        messages=history, tools=[WEATHER], tool_choice="none", max_tokens=4, **GREEDY
    )
    assert again.choices[0].message.tool_calls is None


def test_streamed_tool_calls(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[WEATHER, TIME],
        tool_choice="required",
        max_tokens=400,
        seed=4,
        stream=True,
        parallel_tool_calls=False,
    )
    deltas = [choice for chunk in stream for choice in chunk.choices]
    first, *pieces = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert first.id
    assert first.function
    assert (first.function.name in ("weather", "time"), first.function.arguments) == (True, "")
    assert {(piece.index, piece.id) for piece in pieces} == {(0, None)}
    assert len(pieces) > 1
    json.loads("".join(piece.function.arguments or "" for piece in pieces if piece.function))
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(choice.delta.content for choice in deltas)


def test_arguments_are_told_while_they_are_written(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=400, seed=4,
        parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        told = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        whole = stream.get_final_completion().choices[0].message.tool_calls
    assert whole is not None
    assert len(told) > 5
    assert "".join(event.arguments_delta for event in told) == whole[0].function.arguments


def test_a_conversation_is_continued(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, max_tokens=12, logit_bias={"257": -100}, **GREEDY)
    text = whole.choices[0].message.content or ""
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "abc"}]
    rest = client.chat.completions.create(
        messages=begun, max_tokens=6, extra_body={"continue_final_message": True}, **GREEDY
    )
    raw = "<|bos|><|user|>Hello<|end|><|assistant|>abc"
    same = client.completions.create(prompt=raw, max_tokens=6, **GREEDY)
    assert rest.choices[0].message.content == same.choices[0].text
    assert text != rest.choices[0].message.content


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="long " * 300)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model=MODEL, prompt=[5, 261])
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(openai.BadRequestError, match="response_format: the regex cannot be compiled"):
        client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body={"response_format": {"type": "regex", "regex": "(((("}}
        )


def test_version_and_load_in_vllms_shapes(server: RunningServer, client: openai.OpenAI) -> None:
    with httpx.Client(base_url=server.address) as http:
        assert http.get("/version").json() == {"version": __version__}
        before = http.get("/load").json()["server_load"]
        stream = client.completions.create(prompt="Hi", max_tokens=900, stream=True, **GREEDY)
        next(iter(stream))
        assert http.get("/load").json() == {"server_load": before + 1}
        stream.close()
        while http.get("/load").json()["server_load"] > before:
            pass


def test_probes_metrics_and_request_ids(server: RunningServer, client: openai.OpenAI) -> None:
    client.completions.create(prompt="Hi", max_tokens=4, **GREEDY)
    with httpx.Client(base_url=server.address) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").status_code == 200
        text = http.get("/metrics").text
        assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert (
            http.get("/health", headers={"X-Request-Id": "bad id\x7f"})
            .headers["x-request-id"]
            .startswith("req-")
        )
        missing = http.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_sum",
        "device_memory_bytes",
        "cached_tokens_total",
        "inter_token_latency_seconds_bucket",
        "generation_tokens_total",
        "e2e_request_latency_seconds_sum",
    ):
        assert f"nearfar:{name}{{" in text
    assert re.search(
        r'nearfar:request_success_total\{finished_reason="length",model_name="tiny"\} [1-9]', text
    )


def test_leaving_a_stream_cancels_it(server: RunningServer, client: openai.OpenAI) -> None:
    before = server.engine.stats().generated_tokens
    stream = client.completions.create(
        prompt="Hello", max_tokens=150, stream=True, logit_bias={"257": -100}, model=MODEL, n=4
    )
    next(iter(stream))
    stream.close()
    for _ in range(3000):
        if idle(server):
            break
        asyncio.run(asyncio.sleep(0.01))
    assert idle(server)
    assert server.engine.stats().generated_tokens - before < 4 * 150


def test_a_server_without_the_library_of_grammars_says_how_to_get_it(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: Any = {"type": "json_schema", "json_schema": {"name": "new", "schema": {"const": "never asked for"}}}
    monkeypatch.setattr(service, "find_spec", lambda name: None)
    with pytest.raises(openai.BadRequestError, match=r"need xgrammar on the server: pip install 'nearfar"):
        client.chat.completions.create(messages=HELLO, max_tokens=8, response_format=new, **GREEDY)
    made = client.chat.completions.create(messages=HELLO, max_tokens=8, **GREEDY)
    assert made.choices[0].finish_reason == "length", "all else is answered"
