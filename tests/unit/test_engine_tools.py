"""Tools in the engine: a model with random weights calls them with matching arguments."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.formats import shown_format
from nearfar.errors import RequestError
from tests.support import tiny

pytest.importorskip("llguidance")
HELLO = [{"role": "user", "content": "Hi"}]
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "on": {"type": "boolean"}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {"paint": COLOUR, "stop": {"type": "object", "maxProperties": 0}}
FAMILIES = {
    "hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]",
    "mistral-named": "[TOOL_CALLS][ARGS]", "phi4": "<|tool_call|>", "gemma4": "<|tool_call>",
    "harmony": "<|channel|><|message|>", "pythonic": "[func_name1(", "lfm2": "<|tool_call_start|>",
    "qwen-xml": "<tool_call><function=<parameter=",
}  # fmt: skip


def make(signs: str = "", *, reasoning: bool = True) -> AsyncEngine:
    """An engine whose model's answers have the format of `signs`."""
    form = shown_format(signs)
    # without reasoning, because random weights would never end it
    form = form if reasoning else replace(form, reasoning=None)
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    wide = {**tiny.CONFIG, "max_position_embeddings": 2048}
    codec = TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256, form)
    return AsyncEngine(tiny.core(config=wide, pages=256), codec)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with make() as made:
        yield made


def check(calls: Any, most: int | None = None) -> None:
    assert calls
    assert most is None or len(calls) <= most
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("family", FAMILIES)
async def test_arguments_match_their_schema_in_every_format(family: str) -> None:
    async with make(FAMILIES[family], reasoning=False) as engine:
        assert engine.codec.answers.family == family
        for seed in range(2):
            made = await engine.chat.completions.create(
                HELLO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1.5,
                seed=seed, max_tokens=1500,
            )  # fmt: skip
            choice = made.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            check(choice.message.tool_calls, 1)


async def test_one_tool_by_its_name(engine: AsyncEngine) -> None:
    choice = {"type": "function", "function": {"name": "stop"}}
    made = await engine.chat.completions.create(HELLO, tools=TOOLS, tool_choice=choice, temperature=1.5, n=2)
    assert [c.message.tool_calls[0].function.name for c in made.choices if c.message.tool_calls] == [
        "stop"
    ] * 2


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_stream_gives_the_same_calls(family: str) -> None:
    params: Any = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": 3,
                   "max_tokens": 600}  # fmt: skip
    async with make(FAMILIES[family], reasoning=False) as engine:
        whole = (await engine.chat.completions.create(HELLO, **params)).choices[0].message
        chunks = [chunk async for chunk in await engine.chat.completions.create(HELLO, stream=True, **params)]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert not any(delta.content for delta in deltas)
    assert all(len(delta.tool_calls or ()) < 2 for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    pieces: list[list[str]] = []
    for call in calls:
        if call.id:
            assert (call.index, call.type, call.function.arguments) == (len(pieces), "function", "")
            pieces.append([call.function.name or ""])
        else:
            assert (call.index, call.type, call.function.name) == (len(pieces) - 1, None, None)
            pieces[-1].append(call.function.arguments)
    assert whole.tool_calls is not None
    assert [(name, "".join(more)) for name, *more in pieces] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]
    form = engine.codec.answers.calls
    assert form is not None
    long = [len(more) for name, *more in pieces if name == "paint"]
    assert all((count > 5) == (form.spelling is None) for count in long)
    assert len({call.id for call in calls if call.id}) == len(pieces)


async def test_auto_leaves_text_alone(engine: AsyncEngine) -> None:
    params: Any = {"temperature": 0, "max_tokens": 12}
    plain = await engine.chat.completions.create(HELLO, **params)
    none = await engine.chat.completions.create(HELLO, tools=TOOLS, tool_choice="none", **params)
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    auto = await engine.chat.completions.create(HELLO, tools=TOOLS, **params)
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens
    assert auto.choices[0].message.tool_calls is None
    assert auto.choices[0].message.content


async def test_a_format_is_kept_to_beside_tools(engine: AsyncEngine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
    for seed in range(3):
        made = await engine.chat.completions.create(
            HELLO, tools=TOOLS, response_format=form, temperature=1.5, seed=seed, max_tokens=600
        )
        message = made.choices[0].message
        if message.tool_calls:
            check(message.tool_calls)
        else:
            jsonschema.validate(json.loads(message.content or ""), COLOUR)


async def test_reasoning_comes_apart_from_text() -> None:
    async with make("<think>") as engine:
        form = {"type": "regex", "regex": "yes|no"}
        made = await engine.chat.completions.create(
            [*HELLO, {"role": "assistant", "content": "<think>"}], response_format=form,
            continue_final_message=True, temperature=0, max_tokens=40,
        )  # fmt: skip
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "length"
    assert message.reasoning_content
    assert message.content == ""


async def test_earlier_calls_and_results_stand_in_the_prompt(engine: AsyncEngine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    made = await engine.chat.completions.create(history, max_tokens=1)
    plain = await engine.chat.completions.create(HELLO, max_tokens=1)
    assert made.usage.prompt_tokens > plain.usage.prompt_tokens + 40


async def test_a_call_that_is_cut_tells_what_came(engine: AsyncEngine) -> None:
    made = await engine.chat.completions.create(
        HELLO, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}}, max_tokens=48
    )
    choice = made.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "paint"


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice",
         "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [{"type": "function",
                     "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
         "tools", "at #: 'not'"),
        ({"tools": [{"type": "function",
                     "function": {"name": "f", "parameters": {"required": ["b"], "properties": {},
                                                              "additionalProperties": False}}}]},
         "tools", "'b' is not among the properties"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two of the name 'paint'"),
    ],
)  # fmt: skip
async def test_refused_with_words(engine: AsyncEngine, given: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as raised:
        await engine.chat.completions.create(HELLO, **given)
    assert raised.value.param == param
