"""Grammars by the shared vectors (tests/vectors/grammars.json): llguidance on devices and xgrammar in the
server follow them to the same texts.
"""

from __future__ import annotations

import json
import tarfile
from typing import Any

import pytest

from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.grammars.compiler import Grammars
from nearfar.edge_runtime.openai.formats import grammar_of
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import NearfarError, RequestError
from tests.shared_data import shared_data
from tests.support import tiny
from tests.support.followers import EOS, Match, followed, served
from tests.support.paths import ROOT

VECTORS = json.loads((ROOT / "tests" / "vectors" / "grammars.json").read_text())
NAMES = [vector["name"] for vector in VECTORS]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(tiny.tokenizer(), {}, None, 256)


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
async def test_both_libraries_take_and_refuse_the_same(
    vector: dict[str, Any], library: str, codec: TextCodec
) -> None:
    grammar = grammar_of(vector["format"])
    assert grammar is not None

    async def made() -> Match:
        return await followed(codec, grammar) if library == "llguidance" else served(grammar)

    if "error" in vector:
        with pytest.raises(RequestError) as raised:
            await made()
        assert vector["error"] in str(raised.value)
        assert raised.value.param == "response_format"
        return
    match = await made()
    assert [text for text in vector["accepts"] if not match(text)] == []
    assert [text for text in vector["refuses"] if match(text)] == []


@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
async def test_the_test_suite_accepts_nothing_that_is_invalid(draft: str, codec: TextCodec) -> None:
    """Each schema of the JSON Schema test suite is rejected, or no value that it forbids can be written."""
    archive = shared_data("eval", "json-schema-test-suite", "json-schema-test-suite.tar.gz")
    with tarfile.open(archive) as tar:
        groups = [
            group
            for member in tar
            if member.name.count("/") == 2
            and f"tests/{draft}/" in member.name
            and member.name.endswith(".json")
            for group in json.load(tar.extractfile(member))  # type: ignore[arg-type]
        ]
    kept, wrong = 0, []
    for group in groups:
        try:
            match = await followed(codec, Grammar("json_schema", json.dumps(group["schema"])))
        except NearfarError:
            continue
        kept += 1
        for case in group["tests"]:
            texts = {json.dumps(case["data"]), json.dumps(case["data"], ensure_ascii=False)}
            if not case["valid"] and any(match(text) for text in texts):
                wrong.append((group["schema"], case["data"]))
    assert wrong == []
    assert kept > 120


def _levels(depth: int) -> dict[str, Any]:
    """Objects in which each level has two properties of the next level: 2^depth paths to distinguish."""
    chain: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{level + 1}"} for name in "ab"},
            "required": ["a", "b"],
        }
        for level in range(depth)
    }
    return {**chain, f"d{depth}": {"type": "object"}}


HOSTILE: dict[str, Grammar] = {
    "pairs of a oneOf": Grammar("json_schema", json.dumps({"oneOf": [{"const": n} for n in range(3000)]})),
    "levels of a oneOf": Grammar(
        "json_schema",
        json.dumps({"$defs": _levels(40), "oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}]}),
    ),
    "a pattern that backtracks": Grammar(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"a" * 60 + "!": {}},
                "patternProperties": {"^(a|a)*$": {}},
            }
        ),
    ),
    "repeats of repeats": Grammar("regex", "(.*a.{30}|.*b.{31}|.*c.{33})+"),
    "many states": Grammar("regex", "(a|b)*a(a|b){500}"),
    "parentheses": Grammar("regex", "(" * 20000 + "a" + ")" * 20000),
    "an ambiguous grammar": Grammar("ebnf", 'root ::= root root | root root root | "a" | "aa" | ""'),
    "a long grammar": Grammar("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    "many rules": Grammar(
        "ebnf", "\n".join([f'r{n} ::= "a" r{n + 1}?' for n in range(2500)] + ["root ::= r0", 'r2500 ::= "b"'])
    ),
    "many alternatives": Grammar("ebnf", "root ::= " + " | ".join(f'"a{n}" root' for n in range(3500))),
    "references to references": Grammar(
        "json_schema",
        json.dumps(
            {
                "$defs": {**{f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1500)}, "d1500": {}},
                "anyOf": [{"$ref": "#/$defs/d0"}] * 500,
            }
        ),
    ),
    "many optional properties": Grammar(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1500)}}),
    ),
    "arrays in arrays": Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
}


REFUSED = {
    "pairs of a oneOf": "take too long to tell apart",
    "levels of a oneOf": "take too long to tell apart",
    "a pattern that backtracks": "too many repeats",
    "parentheses": "cannot be compiled",
    "a long grammar": "nested too deeply",
    "many rules": "more than 500",
    "references to references": "more than 64",
    "arrays in arrays": "nested too deeply",
}
"""Keys of vectors whose grammars are rejected; all others are followed."""


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_is_bounded(name: str, codec: TextCodec) -> None:
    """Without its limit each would take many seconds, or run for ever."""
    grammars = Grammars(codec, EOS + 1, [EOS])
    if name in REFUSED:
        with pytest.raises(RequestError, match=REFUSED[name]) as caught:
            await grammars.constraints(HOSTILE[name], 1)
        assert caught.value.param == "response_format"
        assert len(str(caught.value)) < 600
    else:
        constraint = (await grammars.constraints(HOSTILE[name], 1))[0]
        for _ in range(20):
            words = constraint.allowed()
            constraint.accept(next(bit for bit in range(EOS) if words[bit // 32] >> bit % 32 & 1))
    grammars.close()


@pytest.mark.parametrize("vocab_size", [258, 288, 320])
async def test_a_mask_has_a_bit_for_every_token_and_no_word_more(vocab_size: int, codec: TextCodec) -> None:
    """Covers a vocabulary that fills its last word, and one that is larger than the tokenizer's."""
    grammars = Grammars(codec, vocab_size, [EOS])
    constraint = (await grammars.constraints(Grammar("regex", "a"), 1))[0]
    words = constraint.allowed()
    grammars.close()
    assert words.shape == ((vocab_size + 31) // 32,)
    assert [bit for bit in range(32 * len(words)) if words[bit // 32] >> bit % 32 & 1] == codec.encode_raw(
        "a"
    )


async def test_a_model_without_an_end_token_ends_with_its_grammar(codec: TextCodec) -> None:
    grammars = Grammars(codec, EOS + 1, [])
    constraint = (await grammars.constraints(Grammar("regex", "ab"), 1))[0]
    for token in codec.encode_raw("ab"):
        assert constraint.complete_at is None
        assert constraint.accept(token)
    grammars.close()
    assert constraint.complete_at == 2
