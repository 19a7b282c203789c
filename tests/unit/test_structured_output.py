"""Answers match the requested format, over the tiny model, whose random weights know no JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.grammars import compiler
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError, RequestError
from tests.support import tiny

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
}
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
DIGITS = {"type": "regex", "regex": "[0-9]{3}-[0-9]{2}"}


def make(**options: Any) -> AsyncEngine:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    # a long context, because models with random weights write many blanks
    wide = {**tiny.CONFIG, "max_position_embeddings": 1024}
    return AsyncEngine(
        tiny.core(config=wide, **options), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256)
    )


@pytest.fixture(params=[True, False], ids=["pipelined", "in turn"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    async with make(pipelined=request.param, pages=256) as made:
        yield made


def check(text: str | None) -> None:
    jsonschema.validate(json.loads(text or ""), SCHEMA)


async def test_every_answer_of_any_seed_matches_the_schema(engine: AsyncEngine) -> None:
    for seed in range(4):
        made = await engine.chat.completions.create(
            HELLO, response_format=PERSON, temperature=1.5, seed=seed, n=2
        )
        for choice in made.choices:
            check(choice.message.content)
            assert choice.finish_reason == "stop"
        assert made.choices[0].message.content != made.choices[1].message.content


async def test_the_stream_gives_the_same_text_with_its_logprobs(engine: AsyncEngine) -> None:
    params: Any = {
        "response_format": PERSON, "temperature": 1.5, "seed": 5, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = await engine.chat.completions.create(HELLO, **params)
    chunks = [chunk async for chunk in await engine.chat.completions.create(HELLO, stream=True, **params)]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    logprobs = whole.choices[0].logprobs
    assert text == whole.choices[0].message.content
    assert logprobs is not None
    assert "".join(item.token for item in logprobs.content) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_requests_with_and_without_a_grammar_share_steps(engine: AsyncEngine) -> None:
    async def ask(form: Any, seed: int) -> str:
        made = await engine.chat.completions.create(
            HELLO, response_format=form, temperature=1.5, seed=seed, max_tokens=400
        )
        return made.choices[0].message.content or ""

    alone = await ask(None, 1)
    person, plain, digits, anything = await asyncio.gather(
        ask(PERSON, 0), ask(None, 1), ask(DIGITS, 2), ask({"type": "text"}, 1)
    )
    check(person)
    assert re.fullmatch(DIGITS["regex"], digits)
    assert plain == anything == alone


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_grammar_that_ends_ends_the_answer(engine: AsyncEngine, ignore_eos: bool) -> None:
    made = await engine.completions.create(
        "a", response_format=DIGITS, max_tokens=40, temperature=1.5, seed=3, ignore_eos=ignore_eos
    )
    assert re.fullmatch(DIGITS["regex"], made.choices[0].text)
    assert (made.choices[0].finish_reason, made.usage.completion_tokens) == ("stop", 6)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("regex", "whole", "reason"), [("a*", "aaaaa", "length"), ("a?", "a", "stop"), ("(a|b)?", "[ab]", "stop")]
)
async def test_ignore_eos_ends_a_grammar_only_where_nothing_else_may_come(
    engine: AsyncEngine, regex: str, whole: str, reason: str, chat: bool, stream: bool
) -> None:
    params: Any = {
        "response_format": {"type": "regex", "regex": regex}, "ignore_eos": True, "max_tokens": 5,
        "temperature": 0, "logit_bias": {257: 100}, "stream": stream,
    }  # fmt: skip
    text, ended = "", None
    asked = (
        engine.chat.completions.create(HELLO, **params) if chat else engine.completions.create("a", **params)
    )
    made: Any = await asked
    for answer in [chunk async for chunk in made] if stream else [made]:
        choice = answer.choices[0]
        said = (choice.delta if stream else choice.message).content if chat else choice.text
        text, ended = text + (said or ""), choice.finish_reason
    assert (bool(re.fullmatch(whole, text)), ended) == (True, reason)


async def test_an_ebnf_grammar(engine: AsyncEngine) -> None:
    form = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "yes" | "no"'}
    for seed in range(3):
        made = await engine.chat.completions.create(
            HELLO, response_format=form, temperature=1.5, seed=seed, max_tokens=400
        )
        assert re.fullmatch(r"\(*(yes|no)\)*", made.choices[0].message.content or "")


async def test_a_limit_cuts_the_text_and_says_so(engine: AsyncEngine) -> None:
    made = await engine.chat.completions.create(HELLO, response_format=PERSON, max_tokens=4)
    assert made.choices[0].finish_reason == "length"
    assert (made.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "xml"}, "must be an object whose type is one of"),
        ("json", "must be an object whose type is one of"),
        ({"type": "json_object", "schema": {}}, "has no field schema; leave it out"),
        ({"type": "json_schema"}, "needs json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "p", "shema": {}}},
            "no field shema: did you mean schema?",
        ),
        ({"type": "json_schema", "json_schema": {"name": "p", "strict": "yes"}}, "strict must be a bool"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": []}}, "schema must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": {"not": {}}}}, "at #: 'not'"),
        ({"type": "json_schema", "json_schema": {"name": "p", "schema": {"enum": ["a" * 70000]}}}, "65,536"),
        ({"type": "regex"}, "needs the field 'regex'"),
        ({"type": "regex", "regex": "["}, "unclosed character class"),
        ({"type": "grammar", "grammar": "root = 1"}, "the grammar cannot be compiled"),
    ],
)
async def test_what_cannot_be_kept_to_is_refused_by_name(engine: AsyncEngine, form: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        await engine.chat.completions.create(HELLO, response_format=form)
    assert words in str(caught.value)
    assert caught.value.param == "response_format"


async def test_without_the_library_the_error_says_what_to_install(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'nearfar\[edge,grammars\]'"):
        await engine.chat.completions.create(HELLO, response_format=PERSON)
    assert (await engine.chat.completions.create(HELLO, max_tokens=1)).choices


async def test_a_grammar_beyond_its_limits_ends_its_own_request_only(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar is followed for a while, beside other requests."""
    monkeypatch.setitem(compiler.LIMITS, "max_lexer_states", 60)
    hostile = {"type": "regex", "regex": "(.*[a-m].{30}|.*[k-z].{31})+!"}

    async def attack() -> None:
        with pytest.raises(RequestError, match=r"the grammar cannot be followed further: .*states"):
            await engine.completions.create("a", response_format=hostile, max_tokens=300, seed=1)

    plain = {"response_format": DIGITS, "temperature": 1.5, "seed": 1}
    _, made = await asyncio.gather(attack(), engine.completions.create("a", **plain))
    assert re.fullmatch(DIGITS["regex"], made.choices[0].text)


async def test_masks_are_made_once_their_step_is_under_way(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asynchronous device computes the logits meanwhile; only the sampler waits for masks."""
    executor, order = engine.core.executor, list[str]()
    run, write = executor.run, executor.write

    def noted_run(function: str, size: int) -> None:
        order.append(function)
        run(function, size)

    def noted_write(buffer: str, data: Any, row: int = 0, column: int = 0) -> None:
        order.extend(["mask"] * (buffer == "allowed"))
        write(buffer, data, row, column)

    monkeypatch.setattr(executor, "run", noted_run)
    monkeypatch.setattr(executor, "write", noted_write)
    await engine.completions.create("a", response_format=DIGITS, seed=1)
    before = [order[at - 1] for at, what in enumerate(order) if what == "mask"]
    after = {order[at + 1] for at, what in enumerate(order[:-1]) if what == "mask"}
    assert len(before) >= 6
    assert set(before) == {"step"}
    assert "step" not in after


async def test_a_closed_engine_says_so() -> None:
    engine = make()
    await engine.close()
    with pytest.raises(DeviceError, match="closed"):
        await engine.chat.completions.create(HELLO, response_format=PERSON)
