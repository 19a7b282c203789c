"""OpenAI's Responses API of an engine, by the vectors that the web engine passes too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.edge_runtime.openai.records import TokenLogprob, TopLogprob
from nearfar.edge_runtime.openai.responses.asking import chat_of
from nearfar.edge_runtime.openai.responses.checks import checked
from nearfar.edge_runtime.openai.responses.create import KEPT, Response
from nearfar.edge_runtime.openai.responses.shape import ResponseRecords, TokenCounts
from nearfar.edge_runtime.tools.parts import CallPart
from nearfar.errors import RequestError
from nearfar.fallback_server.http.apis.responses import ResponseRequest
from nearfar.fallback_server.http.ignoring import Ignored, computes, ignored
from tests import vectors
from tests.support.tiny import CONFIG
from tests.unit.test_api import HELLO, make

FOLDER = Path(vectors.__file__).with_name("responses")
REQUESTS = json.loads((FOLDER / "requests.json").read_text())
EVENTS = json.loads((FOLDER / "events.json").read_text())["cases"]
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    async with make(config=CONFIG | {"max_position_embeddings": 1024}, pages=256) as made:
        yield made


@pytest.mark.parametrize("case", REQUESTS["taken"], ids=lambda case: case["name"])
def test_a_request_becomes_the_same_chat_here_and_in_the_server(case: dict[str, Any]) -> None:
    before = case.get("before", [])
    assert chat_of(checked(case["request"]), before) == case["chat"]
    token, passing = ignored.set(Ignored()), computes.set(False)
    try:
        assert chat_of(ResponseRequest.model_validate(case["request"]).given, before) == case["chat"]
    finally:
        ignored.reset(token)
        computes.reset(passing)


@pytest.mark.parametrize("case", REQUESTS["refused"], ids=lambda case: str(case["request"])[:60])
def test_what_an_engine_cannot_follow_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        chat_of(checked(case["request"]))
    assert refused.value.param == case["param"]


def events_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a case, with numbered ids and without times."""
    ids = count()
    made = ResponseRecords(
        "resp_0", "sample", checked(case["request"]), True, ids=lambda prefix: f"{prefix}_{next(ids)}"
    )
    events = [*made.begin()]
    for piece in case["pieces"]:
        events += made.piece(_piece(piece))
    events += made.end(TokenCounts(*case["usage"]))
    for event in events:
        if response := event.get("response"):
            response["created_at"] = 0
            response["completed_at"] = response["completed_at"] and 0
    return cast(list[dict[str, Any]], json.loads(json.dumps(events)))


def _piece(given: dict[str, Any]) -> Piece:
    logprobs = tuple(
        TokenLogprob(**{**each, "top_logprobs": [TopLogprob(**top) for top in each["top_logprobs"]]})
        for each in given.get("logprobs", ())
    )
    calls = tuple(CallPart(**call) for call in given.get("calls", ()))
    text, thought = given.get("text", ""), given.get("reasoning", "")
    return Piece(0, text, thought, calls, logprobs, given.get("finish"), tokens=1)


@pytest.mark.parametrize("case", EVENTS, ids=lambda case: case["name"])
def test_an_answer_becomes_the_events_of_the_vectors(case: dict[str, Any]) -> None:
    assert events_of(case) == case["events"]


async def test_a_response_is_the_text_of_the_chat_whole_and_streamed(engine: AsyncEngine) -> None:
    chat = await engine.chat.completions.create(HELLO, max_tokens=12, temperature=0)
    whole = await engine.responses.create("Hello", max_output_tokens=12, temperature=0)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.output[0].content[0].type) == ("incomplete", "output_text")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (9, 12)
    assert Response(json.loads(whole.model_dump_json())).output_text == whole.output_text
    with pytest.raises(AttributeError, match="no field 'outputs'"):
        _ = whole.outputs
    stream = await engine.responses.create("Hello", stream=True, max_output_tokens=12, temperature=0)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-1].response.output_text == whole.output_text


async def test_a_tool_loop_goes_on_by_items_by_ids_and_by_references(engine: AsyncEngine) -> None:
    asked: Any = {"tools": [WEATHER], "max_output_tokens": 60, "temperature": 0}
    first = await engine.responses.create("Hello", tool_choice="required", **asked)
    call = first.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [*HELLO, *first.model_dump()["output"], result]
    named = [*HELLO, *({"id": item.id} for item in first.output), result]
    ways = [
        await engine.responses.create(items, store=False, **asked),
        await engine.responses.create(named, **asked),
        await engine.responses.create([result], previous_response_id=first.id, **asked),
    ]
    assert len({(way.output_text, way.usage.input_tokens) for way in ways}) == 1
    with pytest.raises(RequestError, match="there is no response"):
        await engine.responses.create("Go on.", previous_response_id=ways[0].id)


async def test_effort_and_format_are_followed(engine: AsyncEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    made = await engine.responses.create(
        "Hello", text=form, reasoning={"effort": "none"}, max_output_tokens=200
    )
    assert json.loads(made.output_text) == {"a": 1}


def test_the_synchronous_engine_has_them_too() -> None:
    with Engine(make()) as engine:
        events = list(engine.responses.create("Hello", stream=True, max_output_tokens=2))
        ids = [engine.responses.create("Hello", max_output_tokens=1).id for _ in range(KEPT)]
        assert engine.responses.create("Go on.", previous_response_id=ids[-1], max_output_tokens=1).id
        with pytest.raises(RequestError, match="there is no response"):
            engine.responses.create("Go on.", previous_response_id=events[-1].response.id)
