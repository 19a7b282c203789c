"""JSON schemas: an accepted schema is enforced, and an unenforceable keyword is named. Measured with xgrammar
itself.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.compiler import Grammars
from nearfar.edge_runtime.grammars.patterns import why_not
from nearfar.edge_runtime.grammars.schema import ANNOTATIONS, OF_TYPE, STRUCTURE, narrowed
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import RequestError
from tests.shared_data import shared_data
from tests.support import tiny
from tests.support.followers import EOS, served
from tests.support.late import late

xgrammar = late("xgrammar")
Matches = Callable[[Any, str], bool]
STRING = {"type": "string"}
CODEC = TextCodec(tiny.tokenizer(), {}, None, 256)


@pytest.fixture(scope="module")
def matches() -> Matches:
    info = xgrammar.TokenizerInfo(
        [bytes([b]) for b in range(256)] + [b""], vocab_size=257, stop_token_ids=[256]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True)

    def match(schema: Any, text: str) -> bool:
        made = compiler.compile_json_schema(
            json.dumps(narrowed(schema, strict=True, param="p")), max_whitespace_cnt=16
        )
        matcher = xgrammar.GrammarMatcher(made)
        return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))

    return match


def _refusal(compiled: Callable[[Grammar], Any], grammar: Grammar) -> str:
    """The message with which a grammar is rejected; empty if it is accepted."""
    try:
        compiled(grammar)
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_the_test_suite_accepts_nothing_that_is_invalid(draft: str, matches: Matches) -> None:
    """Each schema of the suite is rejected, or no value that it forbids can be written."""
    archive = shared_data("eval", "json-schema-test-suite", "json-schema-test-suite.tar.gz")
    wrong, fates = [], Counter[str]()
    grammars = Grammars(CODEC, EOS + 1, [EOS])
    with tarfile.open(archive) as tar:
        files = [
            m
            for m in tar
            if m.name.count("/") == 2 and f"tests/{draft}/" in m.name and m.name.endswith(".json")
        ]
        groups = [group for member in files for group in json.load(tar.extractfile(member))]  # type: ignore[arg-type]
    for group in groups:
        grammar = Grammar("json_schema", json.dumps(group["schema"]))
        told = _refusal(served, grammar)
        # Both readers accept the schema, or both reject it, with nearfar's own message.
        assert _refusal(grammars._compile, grammar) == told, group["schema"]
        if told:
            assert "the JSON schema cannot be enforced at #" in told
            fates["refused"] += 1
            continue
        fates["kept"] += 1
        for case in group["tests"]:
            texts = {json.dumps(case["data"]), json.dumps(case["data"], ensure_ascii=False)}
            if not case["valid"] and any(matches(group["schema"], text) for text in texts):
                wrong.append((group["schema"], case["data"]))
    assert wrong == []
    assert fates["kept"] > 120  # so that the measurement measures something


BAD = {"pattern": "(", "type": "string"}
BLAMED: dict[str, Any] = {
    "#/properties/a/items": {"properties": {"a": {"type": "array", "items": BAD}}},
    "#/$defs/P/properties/x": {
        "properties": {"a": STRING, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/P"}]}},
        "$defs": {
            "P": {"type": "object", "properties": {"next": {"$ref": "#/$defs/P"}, "x": BAD}},
            "Q": STRING,
        },
    },
}


@pytest.mark.parametrize("place", BLAMED)
@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_what_a_library_refuses_is_told_by_its_place(
    kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the place even if `narrowed` accepts everything, as here."""
    bad = {"type": "object", **BLAMED[place]}
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": bad}, "end": ">"}
    grammar = Grammar(kind, json.dumps(bad if kind == "json_schema" else {"format": tag}))  # type: ignore[arg-type]
    edge, server = "nearfar.edge_runtime.grammars", "nearfar.fallback_server.grammars"
    for module in (f"{edge}.compiler", f"{edge}.structural", f"{server}.compiled"):
        monkeypatch.setattr(f"{module}.narrowed", lambda schema, **_: schema)
    for compiled in (Grammars(CODEC, EOS + 1, [EOS])._compile, served):
        with pytest.raises(RequestError, match=re.escape(f"at {place}: 'pattern' cannot be followed")):
            compiled(grammar)


KEPT: dict[str, tuple[Any, list[str], list[str]]] = {
    "required without properties": ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}"]),
    "required beside properties": (
        {"type": "object", "properties": {"b": STRING}, "required": ["a"]},
        ['{"b": "x", "a": 1}'],
        ['{"b": "x"}', "{}"],
    ),
    "no type": ({"maxLength": 1}, ['"a"'], ['"ab"', "5"]),
    "two types by their keywords": ({"maxLength": 1, "minimum": 3}, ['"a"', "3"], ['"ab"', "2", "null"]),
    "enum beside a type": ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    "const beside enum": ({"const": 1, "enum": [1, 2]}, ["1"], ["2"]),
    "bounds that are not whole numbers": (
        {"type": "integer", "minimum": 2.5, "exclusiveMaximum": 5},
        ["3", "4"],
        ["2", "5"],
    ),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": STRING}}, ['"a"'], ["1"]),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, ["{}"], ['{"a": 1}']),
    "minItems alone": ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    "a discriminated union": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, k: STRING}, "required": ["k", k]}
                for k in ("a", "b")
            ]
        },
        ['{"k": "a", "a": "x"}'],
        ['{"k": "a", "b": "x"}'],
    ),
    "what pydantic writes": (
        {
            "$defs": {
                "P": {
                    "properties": {
                        "n": {
                            "default": None,
                            "title": "N",
                            "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
                        }
                    },
                    "title": "P",
                    "type": "object",
                }
            },
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P", "description": "d"}},
            "required": ["p"],
            "additionalProperties": False,
        },
        ['{"p": {"n": 1}}', '{"p": {"n": null}}', '{"p": {}}'],
        ['{"p": {"n": -1}}', "{}"],
    ),
    "lengths": (
        {"type": "string", "minLength": 1, "maxLength": 2},
        ['"a"', '"éé"'],
        ['""', '"abc"', '"\x01"', '"\n"'],
    ),
    "a format": ({"type": "string", "format": "date"}, ['"2020-01-01"'], ['"x"']),
    "a pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ['"AB-1"'], ['"AB-"', '"xAB-1"']),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_to(name: str, matches: Matches) -> None:
    schema, right, wrong = KEPT[name]
    assert [text for text in right if not matches(schema, text)] == []
    assert [text for text in wrong if matches(schema, text)] == []


REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({"not": {}}, "'not'", "#"),
    "if": ({"type": "string", "if": {"type": "string"}, "then": {"minLength": 100}}, "'if'", "#"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 6}]}, "'allOf'", "#"),
    "uniqueItems": (
        {"properties": {"x": {"type": "array", "uniqueItems": True}}},
        "'uniqueItems'",
        "#/properties/x",
    ),
    "contains": ({"items": {"contains": {}}}, "'contains'", "#/items"),
    "dependentRequired": (
        {"$defs": {"a": {"dependentRequired": {"a": ["b"]}}}},
        "'dependentRequired'",
        "#/$defs/a",
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.5}, "'multipleOf'", "#"),
    "an unknown keyword": ({"type": "string", "minLenght": 3}, "'minLenght'", "#"),
    "required beside a closed object": (
        {"properties": {}, "required": ["a"], "additionalProperties": False},
        "'required'",
        "#",
    ),
    "beside anyOf": ({"type": "object", "anyOf": [{"required": ["a"]}]}, "'type'", "#"),
    "beside $ref": ({"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": STRING}}, "'maxLength'", "#"),
    "a reference elsewhere": ({"$ref": "http://127.0.0.1:1/x"}, "'$ref'", "#"),
    "a reference to itself": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "itself",
        "#/$defs/a",
    ),
    "a reference to nothing": (
        {"properties": {"a": {"$ref": "#/$defs/b"}}},
        "leads to nothing",
        "#/properties/a",
    ),
    "a reference past the schemas": ({"$ref": "#/default", "default": {"not": {}}}, "leads to nothing", "#"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'", "#"),
    "a pattern that looks ahead": ({"type": "string", "pattern": "^(?=.*\\d).+$"}, "'pattern'", "#"),
    "a pattern with a quote": ({"type": "string", "pattern": '^"$'}, "'pattern'", "#"),
    "a pattern beside a length": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "'pattern'", "#"),
    "two patterns of names": ({"patternProperties": {"a": {}, "b": {}}}, "'patternProperties'", "#"),
    "an exclusive bound of an old draft": ({"minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum", "#"),
    "an empty enum": ({"type": "string", "enum": [1]}, "enum", "#"),
    "a type that is none": ({"type": "unicorn"}, "unicorn", "#"),
    "false": ({"properties": {"a": False}}, "False", "#/properties/a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_its_name_and_place(name: str) -> None:
    schema, named, place = REFUSED[name]
    with pytest.raises(RequestError) as error:
        narrowed(schema, strict=True, param="response_format")
    assert named in str(error.value)
    assert f"at {place}:" in str(error.value)
    assert error.value.param == "response_format"


def test_tools_that_are_not_strict_keep_what_can_be_kept() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": STRING, "uniqueItems": True}},
              "if": {}, "required": ["a"]}  # fmt: skip
    assert narrowed(schema, strict=False, param="tools") == {
        "type": "object", "properties": {"a": {"type": "array", "items": STRING}}, "required": ["a"],
    }  # fmt: skip
    with pytest.raises(RequestError, match=r"tools: .*'if'"):
        narrowed(schema, strict=True, param="tools")


def test_a_keyword_has_one_meaning() -> None:
    known = [*ANNOTATIONS, *STRUCTURE, *(key for keys in OF_TYPE.values() for key in keys)]
    assert len(known) == len(set(known))


@pytest.mark.parametrize(
    "pattern", ["", "a", "^a|b$", "^(ab|c)*d?$", "[^x]", r"\d{3}-\w+", "^[ -~]+$", "a*?", "(?:x)"]
)
def test_patterns_that_are_kept_to(pattern: str) -> None:
    assert why_not(pattern) is None


@pytest.mark.parametrize(
    "pattern", ["a$b", "(^a|b)$", r"\bx", r"(a)\1", "(?i)a", "(?!a)b", r"\\", "\n", "[\x01]", "(", 3]
)
def test_patterns_that_are_not(pattern: Any) -> None:
    assert why_not(pattern)
