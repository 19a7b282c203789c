"""Conversations that outgrow the context, by the vectors that the web engine also passes."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, cast

import pytest

from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.openai.context import (
    ContextPolicy,
    Overflow,
    prompt_limit,
    turns_to_drop,
    without_turns,
)
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError
from tests import vectors
from tests.support import tiny

VECTORS = json.loads(Path(vectors.__file__).with_name("context").joinpath("turns.json").read_text())
SYSTEM = {"role": "system", "content": "Be brief."}
LAST = {"role": "user", "content": "And now?"}


def make(context_policy: ContextPolicy = "error") -> AsyncEngine:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    codec = TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256)
    return AsyncEngine(tiny.core(), codec, context_policy=context_policy)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: cast(str, vector["name"]))
def test_what_is_left_of_a_conversation(vector: dict[str, Any]) -> None:
    messages = [
        {"role": role, "at": at, "tokens": tokens}
        for at, (role, tokens) in enumerate(zip(vector["roles"], vector["tokens"], strict=True))
    ]
    asked = 0

    def count(some: Seq[dict[str, Any]]) -> int:
        nonlocal asked
        asked += 1
        return sum(message["tokens"] for message in some)

    fits = sum(vector["tokens"]) <= vector["limit"]
    dropped = 0 if fits else turns_to_drop(messages, vector["limit"], count)
    assert [message["at"] for message in without_turns(messages, dropped)] == vector["kept"]
    assert asked <= 3


def test_room_is_left_for_an_answer() -> None:
    assert [prompt_limit(1024, most) for most in (None, 10, 900)] == [768, 1014, 512]
    assert prompt_limit(1, None) == 0


def long_conversation(engine: Engine, turns: int) -> list[dict[str, str]]:
    """Turns that together have more tokens than the context."""
    words = "word " * (engine.context // turns)
    asked = [
        message
        for turn in range(turns)
        for message in (
            {"role": "user", "content": f"{turn} {words}"},
            {"role": "assistant", "content": f"Answer {turn}."},
        )
    ]
    return [SYSTEM, *asked, LAST]


def test_the_oldest_turns_are_left_out_and_usage_tells() -> None:
    with Engine(make(context_policy="truncate-oldest")) as engine:
        messages = long_conversation(engine, 4)
        made = engine.chat.completions.create(messages, max_tokens=4, temperature=0)
        left_out = made.usage.prompt_tokens_details.left_out_messages
        assert left_out in (2, 4, 6, 8)
        short = [SYSTEM, *messages[1 + left_out :]]
        alone = engine.chat.completions.create(short, max_tokens=4, temperature=0, context_policy="error")
        assert alone.usage.prompt_tokens == made.usage.prompt_tokens <= prompt_limit(engine.context, 4)
        assert alone.choices[0].message == made.choices[0].message
        assert alone.usage.prompt_tokens_details.left_out_messages is None
        stream = engine.chat.completions.create(
            messages, stream=True, max_tokens=4, stream_options={"include_usage": True}
        )
        usage = [chunk.usage for chunk in stream][-1]
        assert usage is not None
        assert usage.prompt_tokens_details.left_out_messages == left_out
        with pytest.raises(RequestError, match="maximum context length is"):
            engine.chat.completions.create(messages, context_policy="error")


def test_a_conversation_that_fits_stays_whole() -> None:
    with Engine(make()) as engine:
        made = engine.chat.completions.create([SYSTEM, LAST], max_tokens=4, context_policy="truncate-oldest")
        assert made.usage.prompt_tokens_details.left_out_messages is None


def test_a_function_says_what_is_left() -> None:
    seen: list[Overflow] = []

    def keep_last(overflow: Overflow) -> Seq[dict[str, Any]]:
        seen.append(overflow)
        return [dict(overflow.messages[-1])]

    async def later(overflow: Overflow) -> Seq[dict[str, Any]]:
        return keep_last(overflow)

    with Engine(make()) as engine:
        messages = long_conversation(engine, 4)
        for policy in (keep_last, later):
            made = engine.chat.completions.create(messages, max_tokens=4, context_policy=policy)
            assert made.usage.prompt_tokens_details.left_out_messages == len(messages) - 1
        first = seen[0]
        assert first.tokens == first.count(messages) > first.limit == prompt_limit(engine.context, 4)
        assert first.context == engine.context
        with pytest.raises(RequestError, match="at least one"):
            engine.chat.completions.create(messages, context_policy=lambda _: [])
        goes_on = [*messages, {"role": "assistant", "content": "So"}]
        with pytest.raises(RequestError, match="role assistant"):
            engine.chat.completions.create(
                goes_on, continue_final_message=True, context_policy=lambda _: [LAST]
            )


@pytest.mark.parametrize("policy", ["truncate", 5, True])
def test_other_policies_are_refused_by_name(policy: Any) -> None:
    with Engine(make()) as engine, pytest.raises(RequestError) as refusal:
        engine.chat.completions.create([LAST], context_policy=policy)
    assert refusal.value.param == "context_policy"
    with pytest.raises(RequestError, match="context_policy"):
        make(context_policy=policy)


@pytest.mark.parametrize("stream", ["perhaps", 1])
def test_stream_is_true_or_false(stream: Any) -> None:
    with Engine(make()) as engine:
        for ask in (
            lambda: engine.chat.completions.create([LAST], stream=stream),
            lambda: engine.completions.create("a", stream=stream),
        ):
            with pytest.raises(RequestError) as refusal:
                ask()
            assert refusal.value.param == "stream"
        assert engine.completions.create("a", max_tokens=1, stream=cast(Any, None)).choices
