"""Answers, grammars of calls and messages with tools, as tests/vectors/tools says; TypeScript passes the same
vectors.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.arguments import arguments_of
from nearfar.edge_runtime.tools.asking import ToolChoice, answer_grammar
from nearfar.edge_runtime.tools.formats import shown_format
from nearfar.edge_runtime.tools.messages import prepared
from nearfar.edge_runtime.tools.reading import AnswerReader, Fragment
from nearfar.errors import RequestError
from nearfar.format.answers import AnswerFormat
from nearfar.format.conversion import record
from nearfar.format.manifest_file import schema as manifest_schema
from tests.support import tiny
from tests.support.followers import followed, served
from tests.support.paths import ROOT

VECTORS = ROOT / "tests" / "vectors"

READING = json.loads((VECTORS / "tools" / "reading.json").read_text(encoding="utf-8"))


def form_of(data: dict[str, Any]) -> AnswerFormat:
    made: AnswerFormat = record(AnswerFormat, data)
    return made


def events(fragments: list[Fragment]) -> list[dict[str, Any]]:
    """Fragments in the form of the vectors: neighbours of the same kind joined."""
    made: list[dict[str, Any]] = []
    for one in fragments:
        match one.kind:
            case "call":
                made.append({"begun": {"name": one.text, "arguments": ""}})
            case "arguments":
                made[-1]["begun"]["arguments"] += one.text
            case "called":
                call = made.pop()["begun"]
                calls = [{**call, "arguments": json.loads(call["arguments"])}]
                if not (made and "calls" in made[-1]):
                    made.append({"calls": []})
                made[-1]["calls"] += calls
            case _ if made and one.kind in made[-1]:
                made[-1][one.kind] += one.text
            case _:
                made.append({one.kind: one.text})
    return made


@pytest.mark.parametrize("case", READING["cases"], ids=lambda case: f"{case['format']}: {case['name']}")
def test_answers_are_taken_apart_wherever_they_are_cut(case: dict[str, Any]) -> None:
    text = "".join(case["pieces"])
    halves = [[text[:at], text[at:]] for at in range(1, len(text))]
    for pieces in (case["pieces"], [text], list(text), *halves):
        reader = AnswerReader(
            form_of(READING["formats"][case["format"]]),
            case.get("tools", READING["tools"]),
            reasoning_open=case.get("reasoning_open", False),
            calls_only=case.get("calls_only", False),
            loose=case.get("loose", False),
        )
        made = [reader.push(piece) for piece in pieces] + [reader.finish(cut=case.get("cut", False))]
        assert events([one for group in made for one in group]) == case["events"]
        if pieces is case["pieces"] and "fragments" in case:
            assert [[{one.kind: one.text} for one in group] for group in made] == case["fragments"]


ASKING = json.loads((VECTORS / "tools" / "asking.json").read_text(encoding="utf-8"))


def asked(case: dict[str, Any]) -> Grammar | None:
    choice = case["choice"]
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    wanted = case["wanted"] and json.dumps({"type": "structural_tag", "format": case["wanted"]})
    return answer_grammar(
        form_of(ASKING["formats"][case["format"]]),
        [ASKING["tools"][name] for name in case["tools"]],
        ToolChoice("required" if named else choice, named, case["parallel"]),
        wanted and Grammar("structural_tag", wanted),
        case.get("reasoning_open", False),
    )


@pytest.mark.parametrize("case", ASKING["cases"], ids=lambda case: f"{case['format']}: {case['name']}")
def test_what_an_answer_must_match(case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(RequestError, match=case["refused"]):
            asked(case)
        return
    made = asked(case)
    assert (made and json.loads(made.text)["format"]) == case["grammar"]


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "case",
    [case for case in ASKING["cases"] if case.get("grammar")],
    ids=lambda case: f"{case['format']}: {case['name']}",
)
async def test_both_libraries_follow_it(case: dict[str, Any], library: str) -> None:
    pytest.importorskip(library)
    grammar = asked(case)
    assert grammar is not None
    codec = TextCodec(tiny.tokenizer(), {}, None, 256)
    matches = await followed(codec, grammar) if library == "llguidance" else served(grammar)
    assert [text for text in case["accepts"] if not matches(text)] == []
    assert [text for text in case["rejects"] if matches(text)] == []


MESSAGES = json.loads((VECTORS / "tools" / "messages.json").read_text(encoding="utf-8"))
FORMATS = json.loads((VECTORS / "tools" / "formats.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", MESSAGES["cases"], ids=lambda case: f"{case['format']}: {case['name']}")
def test_what_a_chat_template_gets(case: dict[str, Any]) -> None:
    form = form_of(MESSAGES["formats"][case["format"]])
    template = "{{ tools }}" if case["knows_tools"] else "{{ messages }}"
    given = prepared(case["messages"], [MESSAGES["tools"][name] for name in case["tools"]], form, template)
    assert given == (case["given"], case["variables"])


@pytest.mark.parametrize(("text", "read"), MESSAGES["arguments"])
def test_arguments_of_earlier_calls(text: str, read: dict[str, Any]) -> None:
    assert arguments_of(text) == read


def test_arguments_of_any_depth_and_length_are_read() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"a": "' + "x," * 100_000, "{," * 100_000):
        assert arguments_of(text).keys() <= {"a"}


def test_a_role_that_a_template_does_not_know_is_refused() -> None:
    message, form = {"role": "ipython", "content": "x"}, form_of(READING["formats"]["hermes"])
    assert prepared([message], [], form, "{{ tools }} ipython")[0] == [message]
    with pytest.raises(RequestError, match="knows no role 'ipython'") as raised:
        prepared([message], [], form, "{{ tools }}")
    assert raised.value.param == "messages"


@pytest.mark.parametrize("case", FORMATS["cases"], ids=lambda case: case["template"][:40])
def test_the_format_that_a_template_shows(case: dict[str, Any]) -> None:
    assert shown_format(case["template"]) == form_of(case["format"])


@pytest.mark.parametrize("name", READING["formats"])
def test_formats_follow_the_manifests_schema(name: str) -> None:
    schema = manifest_schema()
    jsonschema.validate(READING["formats"][name], {"$ref": "#/$defs/answers", "$defs": schema["$defs"]})
