"""Fields that clients send in addition to the basic ones: formats of answers, forced tools, values without
effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel, Field

from nearfar.fallback_server.http.app import AppOptions
from tests.support.late import late
from tests.support.servers import MODEL, RunningServer, tiny_engine
from tests.support.tiny import TEMPLATE

openai = late("openai")

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PARAMETERS = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
TOOL: Any = {"type": "function", "function": {"name": "pick", "parameters": PARAMETERS}}
HINTED = TEMPLATE + "{{ reasoning_effort | default('') }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    made = RunningServer(lambda: tiny_engine(directory), AppOptions(strict_fields=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.address, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=60)


def chat(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post(
        CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0, **more}
    )


def complete(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post(
        COMPLETION, json={"model": MODEL, "prompt": "Hello", "max_tokens": 8, "temperature": 0, **more}
    )


class Pet(BaseModel):
    """A schema as pydantic writes it: with titles, defaults, definitions and alternatives."""

    class Home(BaseModel):
        town: str | None = Field(None, max_length=4, description="where")

    kind: Literal["cat", "dog"]
    age: int = Field(3, ge=0, le=9)
    home: Home = Home()


def test_a_schema_that_no_grammar_keeps_to_is_refused_by_its_keyword(client: openai.OpenAI) -> None:
    for schema, word in (
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "integer"}, {"minimum": 6}]}, "allOf"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: 'not'"),
    ):
        form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        with pytest.raises(openai.BadRequestError, match=re.escape(word)) as error:
            client.chat.completions.create(model=MODEL, messages=HELLO, response_format=form)
        assert error.value.param == "response_format"
    strict: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="'not'") as error:
        client.chat.completions.create(model=MODEL, messages=HELLO, tools=[strict])
    assert error.value.param == "tools"


NOT = {"name": "g", "strict": True}


@pytest.mark.parametrize(("path", "body", "place"), [
    (CHAT, {"tools": [TOOL, {"type": "function", "function": {**NOT, "parameters": {"not": {}}}}]},
     "tools.1"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}, {**NOT, "input_schema": {"not": {}}}]},
     "tools.1"),
    ("/v1/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [
        {"type": "function", "name": "f"}, {"type": "function", **NOT, "parameters": {"not": {}}}]}]},
     "tools.0.tools.1"),
])  # fmt: skip
def test_the_tool_whose_schema_is_refused_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], place: str
) -> None:
    said = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO}
    limit = {} if path == "/v1/responses" else {"max_tokens": 8}
    made = http.post(path, json={"model": MODEL, **said, **limit, **body})
    name = "n__g" if "namespace" in str(body) else "g"
    message = made.json()["error"]["message"]
    assert (made.status_code, message.partition("'not'")[0]) == (
        400, f"{place}: the JSON schema of '{name}' cannot be enforced at #: "
    )  # fmt: skip


@pytest.mark.parametrize("schema", [
    {"type": "object", "required": ["a"], "properties": {}},
    {"type": "object", "required": ["a", "b"], "additionalProperties": {"type": "boolean"}},
    {"oneOf": [{"const": 1}, {"type": "null"}, {"enum": ["x", "y"]}]},
])  # fmt: skip
def test_a_schema_that_is_taken_is_kept_to(http: httpx.Client, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for seed in range(4):
        made = chat(
            http, response_format=form, seed=seed, temperature=1, max_tokens=400, logit_bias={"125": 3}
        ).json()
        if made["choices"][0]["finish_reason"] == "stop":
            jsonschema.validate(json.loads(made["choices"][0]["message"]["content"]), schema)


def test_openai_parses_a_pydantic_model(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Pet, max_tokens=200, seed=1
    )
    pet = made.choices[0].message.parsed
    assert pet is not None
    assert pet.kind in ("cat", "dog")


@pytest.mark.parametrize(("form", "pattern"), [
    ({"structured_outputs": {"regex": "(yes|no){3}"}}, "(yes|no){3}"),
    ({"structured_outputs": {"choice": ["a.b", "cd"]}}, r"a\.b|cd"),
    ({"structured_outputs": {"grammar": 'root ::= "x" "y"'}}, "xy"),
    ({"structured_outputs": {"json": {"enum": ["é"]}}}, '"é"'),
    ({"structured_outputs": {"json": '{"const": 12}'}}, "12"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ({"guided_regex": "[ab]{2}"}, "[ab]{2}"),
    ({"guided_choice": ['"q"', "\\"]}, r'"q"|\\'),
    ({"guided_json": {"const": None}}, "null"),
    ({"guided_grammar": 'root ::= "z"'}, "z"),
    ({"response_format": {"type": "text"}, "guided_regex": "q"}, "q"),
])  # fmt: skip
def test_forms_as_other_servers_clients_ask_for_them(http: httpx.Client, form: Any, pattern: str) -> None:
    for made in (chat(http, **form), complete(http, **form)):
        assert made.status_code == 200, made.text
        choice = made.json()["choices"][0]
        assert re.fullmatch(pattern, choice.get("text") or choice["message"]["content"], re.DOTALL)


def test_an_answer_has_one_form(http: httpx.Client) -> None:
    for form in ({"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "choice": ["b"]}},
                 {"guided_regex": "a", "guided_choice": ["b"]}, {"guided_json": 3}, {"guided_json": "{"},
                 {"response_format": {"type": "json_object"}, "guided_regex": "a"}):  # fmt: skip
        assert chat(http, **form).status_code == 400


def test_after_a_call_comes_another_or_the_end(http: httpx.Client) -> None:
    for seed in range(6):
        made = chat(
            http, tools=[TOOL], tool_choice="required", temperature=1, seed=seed, max_tokens=300
        ).json()["choices"][0]
        assert not made["message"]["content"]
        assert made["message"]["tool_calls"]
        whole = made["message"]["tool_calls"][: -1 if made["finish_reason"] == "length" else None]
        for call in whole:
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_never_shows_as_text(http: httpx.Client, stream: bool) -> None:
    longest = 0
    for tokens in (3, 11, 20, 30, 45, 60):
        asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": tokens, "stream": stream}
        if stream:
            with http.stream(
                "POST", CHAT, json={"model": MODEL, "messages": HELLO, "temperature": 0, **asked}
            ) as response:
                records = [
                    json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
                ]
            parts = [record["choices"][0]["delta"] for record in records]
            assert records[-1]["choices"][0]["finish_reason"] == "length"
        else:
            choice = chat(http, **asked).json()["choices"][0]
            parts = [choice["message"]]
            assert choice["finish_reason"] == "length"
        assert "".join(part.get("content") or "" for part in parts) == ""
        calls = [call for part in parts for call in part.get("tool_calls") or ()]
        assert all(call["function"]["name"] == "pick" for call in calls if "id" in call)
        longest = max(longest, len(calls))
    assert longest  # some texts are cut after the name


def test_a_forced_call_is_short(http: httpx.Client) -> None:
    """Blanks in the call's JSON are bounded: without them its text has 60 characters."""
    named = {"type": "function", "function": {"name": "pick"}}
    made = chat(http, tools=[TOOL], tool_choice=named, max_tokens=100).json()
    assert made["choices"][0]["finish_reason"] == "tool_calls"
    assert made["usage"]["completion_tokens"] < 80


IDLE: list[dict[str, Any]] = [
    {"best_of": 1},
    {"use_beam_search": False},
    {"skip_special_tokens": True},
    {"spaces_between_special_tokens": True},
    {"include_stop_str_in_output": False},
    {"length_penalty": 1.0},
    {"bad_words": []},
    {"return_token_ids": False},
    {"guided_decoding_backend": None},
    {"allowed_token_ids": None},
]
IDLE_CHAT: list[dict[str, Any]] = [
    {"verbosity": "medium"},
    {"modalities": ["text"]},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_key": "k"},
    {"functions": None},
    {"function_call": None},
    {"prediction": None},
    {"web_search_options": None},
    {"audio": None},
    {"chat_template": None},
    {"add_special_tokens": False},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "medium"},
    {"echo": False},
    {"chat_template_kwargs": {"documents": ["a", 1, True], "enable_thinking": False}},
]


def test_fields_at_values_that_change_nothing_are_taken(http: httpx.Client) -> None:
    plain, text = chat(http).json()["choices"], complete(http).json()["choices"]
    for fields in (*IDLE, *IDLE_CHAT):
        made = chat(http, **fields)
        assert made.status_code == 200, (fields, made.text)
        assert made.json()["choices"] == plain
    for fields in IDLE:
        assert complete(http, **fields).json()["choices"] == text, fields


def test_at_other_values_they_are_refused_by_name(http: httpx.Client) -> None:
    for name, value in {
        "use_beam_search": True,
        "skip_special_tokens": False,
        "best_of": 2,
        "length_penalty": 2.0,
        "bad_words": ["x"],
        "allowed_token_ids": [1],
        "modalities": ["audio"],
        "verbosity": "low",
        "functions": [],
        "prediction": {},
        "reasoning_effort": "high",
    }.items():
        made = chat(http, **{name: value})
        assert made.status_code == 400, name
        assert name in made.json()["error"]["message"]
        assert made.json()["error"]["param"] == name


BEGUN = [*HELLO, {"role": "assistant", "content": "I"}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stop_token_ids": [1, 1_000_000_000]}, "stop_token_ids", "token id 1000000000 is outside"),
        ({"min_tokens": 9}, "min_tokens", "min_tokens is 9, and an answer may have 8 tokens at most"),
        ({"max_completion_tokens": 5}, "max_tokens", "max_tokens is 8, and max_completion_tokens"),
        ({"max_completion_tokens": 8}, None, ""),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "give one of them",
        ),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, None, ""),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str | None, words: str
) -> None:
    made = chat(http, **fields)
    assert (made.status_code, words in made.text) == (400 if words else 200, True), made.text
    assert param is None or made.json()["error"]["param"] == param
    if "stop_token_ids" in fields or "min_tokens" in fields:
        assert words in complete(http, **fields).text
    if "messages" in fields:
        names = {"model": MODEL, **fields}
        assert http.post("/tokenize", json=names).status_code == made.status_code


@pytest.mark.parametrize("most", [None, 2000])
def test_the_context_must_have_room_for_the_least_tokens(http: httpx.Client, most: int | None) -> None:
    fields = {"model": MODEL, "min_tokens": 1500, "max_tokens": most}
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETION, {"prompt": "Hello"})):
        made = http.post(path, json={**prompt, **fields})
        error = made.json()["error"]
        assert (made.status_code, error["param"]) == (400, "min_tokens")
        assert error["message"].startswith(
            "min_tokens is 1500, and after this prompt the context has room for"
        )


def test_a_plain_completion_has_at_most_16_tokens_by_default(http: httpx.Client) -> None:
    made = http.post(COMPLETION, json={"model": MODEL, "prompt": "Hello", "min_tokens": 17})
    assert (made.status_code, made.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "other"])
def test_a_field_of_messages_is_refused_in_every_role(http: httpx.Client, role: str) -> None:
    said = {"role": role, "content": "x", **({"tool_call_id": "a"} if role == "tool" else {})}
    for name in ("function_call", "audio"):
        made = chat(http, messages=[*HELLO, {**said, name: {}}])
        assert (made.status_code, name in made.text) == (400, True), made.text
        if role != "other":  # the template knows no such role
            assert chat(http, messages=[*HELLO, {**said, name: None}]).status_code == 200


def test_a_schema_needs_no_name(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 12}}}
    assert chat(http, response_format=form).json()["choices"][0]["message"]["content"] == "12"


def test_effort_reaches_a_template_that_follows_it_and_tools_their_own(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(HINTED)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    server = RunningServer(lambda: tiny_engine(tmp_path))
    try:
        with httpx.Client(base_url=server.address, timeout=60) as http:
            tokens = [
                chat(http, **more).json()["usage"]["prompt_tokens"]
                for more in (
                    {},
                    {"reasoning_effort": "high"},
                    {"tools": [TOOL]},
                    {"tools": [TOOL], "tool_choice": "none"},
                )
            ]
    finally:
        server.close()
    assert tokens[1:] == [tokens[0] + len("high"), len(TOOL["function"]["name"]), tokens[0]]


def test_messages_as_clients_send_them_back(http: httpx.Client) -> None:
    cached = {"type": "ephemeral"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind.", "cache_control": cached}]},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "reasoning": "hm", "refusal": None},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "user", "content": "again"},
    ]
    made = chat(http, messages=messages, tools=[{**TOOL, "cache_control": cached}], tool_choice="none")
    assert made.status_code == 200, made.text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"continuous_usage_stats": True}, True),
        ({"include_usage": None, "continuous_usage_stats": True}, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"include_usage": True, "continuous_usage_stats": False}, True),
    ],
)
def test_usage_comes_unless_include_usage_says_that_it_is_not_wanted(
    http: httpx.Client, options: dict[str, Any], told: bool
) -> None:
    streamed = complete(http, stream=True, stream_options=options, max_tokens=2).text
    assert ('"usage"' in streamed) == told


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_usage_in_every_chunk(http: httpx.Client, path: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "model": MODEL,
        "max_tokens": 6,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
        **prompt,
    }
    with http.stream("POST", path, json={**body, "logit_bias": {"257": -100}}) as response:
        records = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    counts = [record["usage"]["completion_tokens"] for record in records]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0 if path == CHAT else 1, 6)  # a chat's first chunk has no token
    assert len(set(counts)) > 3
    assert all(
        record["usage"]["prompt_tokens"] == records[-1]["usage"]["prompt_tokens"] for record in records
    )


def test_log_probabilities_of_the_chosen_tokens_alone(http: httpx.Client) -> None:
    """With logprobs 0, each token's own log-probability, in OpenAI's and vLLM's shapes."""
    made = complete(http, logprobs=0).json()["choices"][0]["logprobs"]
    assert len(made["tokens"]) == len(made["top_logprobs"])
    assert made["top_logprobs"] == [
        {token: value} for token, value in zip(made["tokens"], made["token_logprobs"], strict=True)
    ]
    content = chat(http, logprobs=True, top_logprobs=0).json()["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in content] == [[] for _ in content]
    assert all(item["logprob"] <= 0 for item in content)


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        (
            "application/x-www-form-urlencoded",
            '{"model": "tiny"}',
            "'application/x-www-form-urlencoded': send",
        ),
        (None, "{}", "it is none: send Content-Type: application/json"),
        ("application/json", "[1]", "the body is a list, not a JSON object: send an object"),
        ("application/json", '"hi"', "the body is 'hi', not a JSON object: send an object"),
        ("application/json", "", "the body is empty: send an object"),
        (
            "application/json",
            '{"model": "tiny", "messages": {}}',
            "messages: this must be a list, not an object",
        ),
        (
            "application/json",
            '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": true, '
            '"stream_options": {"x": 1}}',
            "stream_options.x; there are continuous_usage_stats, include_obfuscation, include_usage",
        ),
        (
            "application/json",
            '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
            '"chat_template_kwargs": {"a": {}}}',
            "this must be true or false, a whole number, a number, a string or a list, not an object",
        ),
    ],
)
def test_a_wrong_body_gets_one_plain_sentence(
    server: RunningServer, content_type: str | None, body: str, said: str
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = httpx.post(f"{server.address}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
