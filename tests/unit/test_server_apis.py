"""OpenAI's Responses API, Anthropic's Messages API and Ollama's API, called by their official clients at
their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nearfar.edge_runtime.openai.responses.kept import KeptResponses
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.hints import Hint, followed
from nearfar.fallback_server.http.app import AppOptions
from nearfar.fallback_server.http.keys import Key, KeyStore, add_key, hashed
from tests.support.late import late
from tests.support.servers import MODEL, RunningServer, tiny_engine

openai = late("openai")
anthropic = late("anthropic")
ollama = late("ollama")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
FUNCTION: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": SCHEMA,
    "strict": True,
}
NAMESPACE: Any = {
    "type": "namespace",
    "name": "mcp__calendar",
    "description": "Dates.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}],
}
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    made = RunningServer(lambda: tiny_engine(directory))
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Any:
    return anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llama(server: RunningServer) -> Any:
    return ollama.Client(host=server.address)


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=60) as made:
        yield made


# Responses


def test_a_response_whole_and_streamed_is_the_same_text(client: Any) -> None:
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (9, 12, 21)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-1].response.output_text == whole.output_text
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content == said


def test_tools_that_run_elsewhere_are_skipped_and_named(client: Any) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL,
        input=HELLO,
        tools=[{"type": "web_search"}, FUNCTION, NAMESPACE],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
        include=["reasoning.encrypted_content"],
    )
    assert raw.headers["x-nearfar-ignored"] == "tools.web_search, include.reasoning.encrypted_content"
    (call,) = raw.parse().output
    assert (call.type, call.name in ("weather", "add")) == ("function_call", True)


def test_only_allowed_tools_may_be_called(http: httpx.Client) -> None:
    allowed = [{"type": "function", "name": "weather"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    body: Any = {"input": "Hello", "max_output_tokens": 60, "tools": [FUNCTION, NAMESPACE]}
    made = http.post("/v1/responses", json={**body, "tool_choice": choice})
    assert [item["name"] for item in made.json()["output"]] == ["weather"]
    assert made.headers["x-nearfar-ignored"] == "tool_choice.tools.web_search"
    choice["tools"] = [*allowed, {"type": "function", "name": "mail"}]
    refused = http.post("/v1/responses", json={**body, "tool_choice": choice})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert "'mail', which is not among the tools" in refused.text


def test_a_function_of_a_namespace_is_called_by_its_own_name(client: Any) -> None:
    choice = {"type": "function", "name": "add", "namespace": "mcp__calendar"}
    events = list(
        client.responses.create(
            model=MODEL,
            input="Hello",
            tools=[NAMESPACE],
            tool_choice=choice,
            max_output_tokens=100,
            stream=True,
        )
    )
    (call,) = events[-1].response.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("mcp__calendar", "add", {})
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments


def test_a_tool_loop_goes_on_with_the_items_of_the_answer(client: Any) -> None:
    asked = {"model": MODEL, "tools": [FUNCTION], "max_output_tokens": 60}
    first = client.responses.create(**asked, input=HELLO, tool_choice="required", instructions="Be brief.")
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(**asked, input=[*HELLO, *first.output, result], store=False)
    followed_up = client.responses.create(**asked, input=[result], previous_response_id=first.id)
    # Instructions do not carry over; the conversation does.
    assert again.usage.input_tokens == followed_up.usage.input_tokens > first.usage.input_tokens
    count = client.responses.input_tokens.count(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[FUNCTION]
    )
    assert count.input_tokens == followed_up.usage.input_tokens
    # The AI SDK names items of earlier answers by their ids.
    named = [*HELLO, {"type": "item_reference", "id": call.id}, result]
    assert client.responses.create(**asked, input=named).usage.input_tokens == again.usage.input_tokens


def test_a_format_is_kept_to(client: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(model=MODEL, input="Hello", text=text, max_output_tokens=80)
    assert 0 <= json.loads(made.output_text)["age"] <= 9


def test_responses_are_kept_until_they_are_deleted(client: Any) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "Hello"
    client.responses.delete(made.id)
    for act in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            act(made.id)
    lost = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2, store=False)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation") as refused:
        client.responses.create(model=MODEL, input="Hello", previous_response_id=lost.id)
    assert refused.value.param == "previous_response_id"


def test_the_items_of_a_response_come_page_by_page(client: Any, http: httpx.Client) -> None:
    said = [{"role": "user", "content": str(number)} for number in range(5)]
    made = client.responses.create(model=MODEL, input=said, max_output_tokens=2)
    for order in ("asc", "desc"):
        page = client.responses.input_items.list(made.id, limit=2, order=order)
        assert (len(page.data), page.has_more) == (2, True)
        texts = [item.content[0].text for item in page]  # the client reads the other pages by `after`
        assert texts == sorted("01234", reverse=order == "desc")
    assert not client.responses.input_items.list(made.id).has_more
    path = f"/v1/responses/{made.id}"
    for query in ("limit=0", "limit=101", "limit=x", "limit=", "order=up", "after=nothing"):
        refused = http.get(f"{path}/input_items?{query}")
        name, _, value = query.partition("=")
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], repr(value) in error["message"]) == (400, name, True)
    with pytest.raises(openai.BadRequestError, match="only while it is made"):
        client.responses.retrieve(made.id, stream=True)
    assert http.get(f"{path}?stream=false").json()["id"] == made.id
    assert http.get(f"{path}?stream=maybe").json()["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}]},
            "input",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "zebra"}}}},
            "text.format",
        ),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
def test_what_a_response_cannot_follow_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    made = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2, **fields})
    assert (made.status_code, made.json()["error"]["param"]) == (400, param), made.text


def test_the_store_gives_way_where_most_is_kept() -> None:
    kept = KeptResponses(most=3)
    kept.put("one", {"id": "a"}, [{"id": "said"}], [])
    for name in ("b", "c", "d"):
        kept.put("other", {"id": name, "text": "x" * 100}, [{"id": f"item of {name}"}], [])
    assert kept.find("one", "a").record["id"] == "a"
    assert kept.find("other", "d").record["id"] == "d"
    for owner, name in (("other", "b"), ("one", "d")):  # b gave way, and d belongs to another owner
        with pytest.raises(RequestError):
            kept.find(owner, name)
    references = [{"type": "item_reference", "id": f"item of {name}"} for name in "bcd"]
    assert kept.resolved("other", references[1:]) == [{}, {}]
    for owner, given in (("other", references[:1]), ("one", references[2:])):
        with pytest.raises(RequestError, match="there is no item 'item of "):
            kept.resolved(owner, given)
    KeptResponses(most_bytes=10).put("one", {"id": "large"}, [], [])


# Messages


def test_a_message_whole_and_streamed_is_the_same_text(claude: Any, client: Any) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=5)
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": {"top_k": 1}}
    whole = claude.messages.create(**asked)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert stream.get_final_message().content[0].text == whole.content[0].text


def test_a_tool_is_used_and_its_result_is_read(claude: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 60}
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    with claude.messages.stream(**asked, messages=HELLO, tools=tools, tool_choice={"type": "any"}) as stream:
        stream.until_done()
    first = stream.get_final_message()
    assert [block.type for block in first.content] == ["tool_use"]
    assert 0 <= first.content[0].input["age"] <= 9
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "rain", "is_error": True}
    talk = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    again = claude.messages.create(
        **asked, messages=talk, tools=tools, system=[{"type": "text", "text": "Be brief."}]
    )
    assert again.usage.cache_read_input_tokens >= 0
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == 9


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "auto"}}, ""),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": "x"}
            ]}, *HELLO]},
            "input: this must be an object, not 'x'",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": SCHEMA},
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            },
            "output_format and output_config.format differ",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": SCHEMA},
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "",
        ),
    ],
)  # fmt: skip
def test_fields_of_a_message_that_contradict_each_other_are_refused(
    http: httpx.Client, fields: dict[str, Any], words: str
) -> None:
    made = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 2, **fields})
    assert (made.status_code == 400, words in made.text) == (bool(words), True), made.text


def test_a_stop_sequence_is_told(claude: Any) -> None:
    text = (
        claude.messages.create(model=MODEL, messages=HELLO, max_tokens=12, extra_body={"top_k": 1})
        .content[0]
        .text
    )
    made = claude.messages.create(
        model=MODEL, messages=HELLO, max_tokens=12, stop_sequences=[text[3:5]], extra_body={"top_k": 1}
    )
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", text[3:5])


def test_the_id_of_a_request_reaches_anthropics_client(claude: Any, http: httpx.Client) -> None:
    made = claude.messages.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert made._request_id.startswith("req-")
    given = http.post("/v1/messages", json={}, headers={"x-request-id": "mine"})
    assert (given.status_code, given.headers["request-id"], given.headers["x-request-id"]) == (
        400,
        "mine",
        "mine",
    )


def test_errors_have_anthropics_shape(claude: Any, http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(**{**asked, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*maximum context length"):
        claude.messages.create(**{**asked, "messages": [{"role": "user", "content": "x" * 9000}]})
    missing = http.post("/v1/messages", json={"messages": HELLO}).json()
    assert missing == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: this field is missing"},
    }


def test_claude_codes_request_is_taken(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "stream": True,
    }
    made = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert made.status_code == 200, made.text
    assert made.headers["x-nearfar-ignored"] == "context_management, output_config.effort, thinking"
    assert "event: message_stop" in made.text


# Ollama


def test_ollamas_client_chats_generates_and_lists(llama: Any) -> None:
    assert [model.model for model in llama.list().models] == [MODEL]
    assert llama.show(MODEL).modelinfo["nearfar.context_length"] == 1024
    asked = {"model": f"{MODEL}:latest", "options": {"num_predict": 8, "top_k": 1}}
    whole = llama.chat(**asked, messages=HELLO)
    pieces = list(llama.chat(**asked, messages=HELLO, stream=True))
    assert (whole.eval_count, pieces[-1].eval_count, pieces[-1].done_reason) == (8, 8, "length")
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert llama.generate(**asked, prompt="Hello").response == whole.message.content
    assert llama.generate(**asked, prompt="Hello", raw=True).response != whole.message.content
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        llama.chat(model="other", messages=HELLO)


def test_an_answer_of_one_token_has_a_duration(llama: Any) -> None:
    """Clients divide by it."""
    one = llama.generate(model=MODEL, prompt="Hello", options={"num_predict": 1})
    assert one.eval_count / one.eval_duration > 0


def test_ollamas_tools_and_formats(llama: Any) -> None:
    made = llama.generate(model=MODEL, prompt="Hello", format=SCHEMA, options={"num_predict": 80})
    assert 0 <= json.loads(made.response)["age"] <= 9
    call = {"function": {"name": "weather", "arguments": {"age": 3}}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    said = llama.chat(model=MODEL, messages=talk, tools=[tool], options={"num_predict": 4})
    assert said.prompt_eval_count > 100


def test_anthropics_client_lists_models(claude: Any) -> None:
    page = claude.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, MODEL)
    assert claude.models.retrieve(MODEL).created_at == model.created_at
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.models.retrieve("nope")
    assert error.value.body["type"] == "error"  # type: ignore[index,call-overload]


def test_small_endpoints(http: httpx.Client) -> None:
    assert http.get("/").json()["status"] == "ok"
    assert http.head("/").status_code == 200
    assert http.get("/api/version").status_code == http.get("/api/ps").status_code == 200
    assert http.get("/models").json() == http.get("/v1/models").json()
    tokens = http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True}).json()
    assert (tokens["count"], tokens["token_strs"]) == (5, list("Hello"))
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello"}
    talk = http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert talk["count"] == 9
    assert http.post("/detokenize", json={"tokens": talk["tokens"]}).json()["prompt"] == "".join(
        talk["token_strs"]
    )
    for path, body in (
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses/input_tokens", {"input": "Hello"}),
    ):
        assert "x-nearfar-estimated" not in http.post(path, json=body).headers
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    far = http.post("/detokenize", json={"tokens": [99999]})
    assert (far.status_code, "outside the vocabulary" in far.text) == (400, True)


def test_prompts_longer_than_the_context_are_counted(client: Any, claude: Any, http: httpx.Client) -> None:
    text = "x" * 9000  # the context has 1,024 tokens
    talk = [{"role": "user", "content": text}]
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert (tokens["count"], tokens["tokens"], tokens["max_model_len"]) == (9000, [87] * 9000, 1024)
    chat = http.post("/tokenize", json={"messages": talk}).json()
    assert (chat["count"], len(chat["tokens"])) == (9004, 9004)
    assert claude.messages.count_tokens(model=MODEL, messages=talk).input_tokens == 9004
    assert client.responses.input_tokens.count(model=MODEL, input=text).input_tokens == 9004
    long = "x" * ((1 << 20) + 1)
    refused = http.post("/tokenize", json={"prompt": long})
    assert (refused.status_code, "1,048,577 tokens" in refused.text) == (400, True)
    counted = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": long}]})
    assert counted.json() == {"input_tokens": len(long) + 4}


def test_a_loaded_model_stays_and_raw_stands_alone(llama: Any, http: httpx.Client) -> None:
    (running,) = llama.ps().models
    assert running.expires_at.year > 2300  # as Ollama tells it of a model that stays loaded
    base = {"prompt": "Hello", "raw": True, "stream": False, "options": {"num_predict": 2}}
    refused = http.post("/api/generate", json={**base, "system": "Be brief."})
    assert (refused.status_code, "without system" in refused.json()["error"]) == (400, True)
    assert http.post("/api/generate", json={**base, "system": ""}).status_code == 200
    hinted = http.post("/api/generate", json={**base, "think": True, "keep_alive": "5m"})
    assert (hinted.status_code, hinted.headers["x-nearfar-ignored"]) == (200, "keep_alive, think")
    stays = http.post("/api/generate", json={**base, "keep_alive": -1})
    assert (stays.status_code, "x-nearfar-ignored" in stays.headers) == (200, False)


# Keys and hints


def test_keys_open_every_api_in_the_words_of_its_clients(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.toml", Key("alice", hashed("secret")))
    add_key(tmp_path / "keys.toml", Key("bob", hashed("hidden"), models=("other",)))
    options = AppOptions(keys=KeyStore(tmp_path / "keys.toml"), store=False)
    server = RunningServer(lambda: tiny_engine(tmp_path / "tokenizer"), options)
    try:
        with httpx.Client(base_url=server.address, timeout=60) as http:
            body = {"model": MODEL, "max_tokens": 2, "messages": HELLO}
            refused = http.post("/v1/messages", json=body)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert http.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).status_code == 200
            assert isinstance(http.post("/api/chat", json={"messages": HELLO}).json()["error"], str)
            bearer = {"Authorization": "Bearer secret"}
            assert http.get("/api/tags", headers=bearer).status_code == 200
            asked = {"input": "Hello", "previous_response_id": "resp_1"}
            told = http.post("/v1/responses", json=asked, headers=bearer)
            assert (told.status_code, "--no-store" in told.text) == (400, True)
            bob = {"Authorization": "Bearer hidden"}  # this key is for another model
            assert (
                http.post("/detokenize", json={"model": MODEL, "tokens": [39]}, headers=bob).status_code
                == 404
            )
            assert http.get("/api/tags", headers=bob).json() == {"models": []}
    finally:
        server.close()


@pytest.mark.parametrize(
    ("hint", "template", "variables", "left"),
    [
        (
            Hint("reasoning_effort", "reasoning_effort", "high"),
            "{{ reasoning_effort }}",
            {"reasoning_effort": "high"},
            (),
        ),
        (
            Hint("reasoning_effort", "reasoning_effort", "high"),
            "{{ message.reasoning_effort }}",
            {},
            ("reasoning_effort",),
        ),
        (Hint("reasoning_effort", "reasoning_effort", "medium"), "", {}, ()),
        (
            Hint("reasoning_effort", "reasoning_effort", "none"),
            "{% if enable_thinking %}",
            {"enable_thinking": False},
            (),
        ),
        (
            Hint("think", "thinking", True),
            "{% if enable_thinking is defined %}",
            {"enable_thinking": True},
            (),
        ),
        (Hint("thinking", "thinking", True), "{% if thinking %}{{ m.thinking }}", {"thinking": True}, ()),
        (Hint("thinking", "thinking", True), "{{ m['thinking'] }}{{ m.thinking }}", {}, ("thinking",)),
        (Hint("verbosity", "verbosity", "low"), "{{ verbosity }}", {"verbosity": "low"}, ()),
    ],
)
def test_hints_become_variables_of_the_template(
    hint: Hint, template: str, variables: dict[str, Any], left: tuple[str, ...]
) -> None:
    assert followed([hint], template, thinks=True) == (variables, left)
    off = Hint("think", "thinking", False)
    assert followed([off], "", thinks=False) == ({}, ())
    assert followed([off], "", thinks=True) == ({}, ("think",))
