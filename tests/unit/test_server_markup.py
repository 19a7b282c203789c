"""Reasoning and tool calls in a model's text, and the grammars of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime.grammars import Grammar
from nearfar.errors import RequestError
from nearfar.fallback_server.engines import tools
from nearfar.fallback_server.engines.base import ToolChoice
from nearfar.fallback_server.engines.markup import (
    Fragment,
    MarkupSplitter,
    call_format,
    parse_calls,
    partial_call,
)
from nearfar.fallback_server.marks import HERMES, LLAMA, MISTRAL, THINK, CallFormat

CALL = '{"name": "f", "arguments": {"x": 1}}'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
]


def split(parts: list[str], calls: CallFormat | None = HERMES, *, opened: bool = False) -> list[Fragment]:
    """All fragments, neighbours of one kind joined."""
    splitter = MarkupSplitter(THINK, calls, reasoning_open=opened)
    out: list[Fragment] = []
    for fragment in [f for part in parts for f in splitter.push(part)] + splitter.finish():
        if out and out[-1].kind == fragment.kind != "call":
            out[-1] = Fragment(fragment.kind, out[-1].text + fragment.text)
        else:
            out.append(fragment)
    return out


def test_reasoning_and_calls_are_taken_out() -> None:
    text = f"<think>why</think>\n\nSo: <tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
    assert split([text]) == [
        Fragment("reasoning", "why"),
        Fragment("text", "So: "),
        Fragment("call", CALL + "\n"),
        Fragment("call", CALL),
    ]


def test_a_section_that_the_prompt_opened_and_marks_that_never_close() -> None:
    assert split(["why</think>yes"], opened=True) == [Fragment("reasoning", "why"), Fragment("text", "yes")]
    assert split(["<think>on and on"]) == [Fragment("reasoning", "on and on")]
    assert split(["a <tool_call>{"]) == [Fragment("text", "a "), Fragment("cut", "{")]
    assert split(["[TOOL_CALLS]" + CALL], MISTRAL) == [Fragment("call", CALL)]
    assert split(["1 < 2 <thin"]) == [Fragment("text", "1 < 2 <thin")]


MARKED = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "<", "a ", "<tool", "_call>", "é"]
    ),
    max_size=12,
)


@given(MARKED, st.randoms(use_true_random=False))
def test_where_the_text_is_cut_does_not_matter(words: list[str], random: Any) -> None:
    text = "".join(words)
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, 8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(parts) == split([text])


@given(st.text(alphabet="<>think/ab", max_size=40))
def test_without_whole_marks_no_text_is_lost(text: str) -> None:
    if "<think>" not in text:
        assert "".join(f.text for f in split(list(text))) == text


def test_calls_are_parsed() -> None:
    found = parse_calls(f"[{CALL}, {CALL}]", MISTRAL, 2)
    assert found is not None
    assert [(call.index, call.name, json.loads(call.arguments)) for call in found] == [
        (2, "f", {"x": 1}),
        (3, "f", {"x": 1}),
    ]
    llama = parse_calls('{"name": "f", "parameters": {"x": 1}}', LLAMA, 0)
    assert llama is not None
    assert json.loads(llama[0].arguments) == {"x": 1}
    for wrong in ("", "[]", "{}", '{"name": 1}', '{"name": "f", "arguments": 3}', "[" * 100_000):
        assert parse_calls(wrong, MISTRAL, 0) is None


def test_a_call_that_was_cut() -> None:
    cut = partial_call('\n{"name": "f", "arguments": {"x": "a}', 1)
    assert cut is not None
    assert (cut.index, cut.name, cut.arguments) == (1, "f", '{"x": "a}')
    whole = partial_call(f"[{CALL}\n</tool", 0)
    assert whole is not None
    assert whole.arguments == '{"x": 1}'
    named = partial_call('{"name": "f", "argu', 0)
    assert named is not None
    assert named.arguments == ""
    assert partial_call('{"name": "f', 0) is None


def test_the_format_is_read_off_the_template() -> None:
    assert call_format("{% if tools %}<tool_call>{% endif %}") == (HERMES, True)
    assert call_format("{{ tools }}[TOOL_CALLS]") == (MISTRAL, True)
    assert call_format('{{ tools }} {"name": x, "parameters": y}') == (LLAMA, True)
    assert call_format("{{ messages }}") == (HERMES, False)


def test_tools_in_words_for_templates_that_know_none() -> None:
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    made = tools.described(history, TOOLS, HERMES)
    assert [message["role"] for message in made] == ["system", "assistant", "user"]
    assert made[0]["content"].startswith("Be kind.\n\nYou can call")
    assert '"name": "g"' in made[0]["content"]
    assert "<tool_call>" in made[1]["content"]
    assert made[2]["content"] == "Result: 2"


def test_choices_of_tools() -> None:
    assert tools.offered(TOOLS, ToolChoice("none")) == ()
    assert [t["function"]["name"] for t in tools.offered(TOOLS, ToolChoice("required", "g"))] == ["g"]
    with pytest.raises(RequestError, match="'h'"):
        tools.offered(TOOLS, ToolChoice("required", "h"))
    with pytest.raises(RequestError, match="not JSON"):
        tools.with_parsed_arguments(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        )


def test_grammars_of_calls() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from nearfar.fallback_server.grammars.compiled import compiler

    info = xgrammar.TokenizerInfo(
        [bytes([b]) for b in range(256)] + [b""], vocab_size=257, stop_token_ids=[256]
    )
    compile_grammar = compiler(info)

    def matches(grammar: Grammar, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compile_grammar(grammar))
        return bool(matcher.accept_string(text)) and bool(matcher.accept_token(256))

    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    wrong = call.replace("1}", '"1"}')
    auto = tools.call_grammar(TOOLS, ToolChoice(), HERMES, None, False)
    assert matches(auto, "hello")
    assert matches(auto, "hello " + call)
    assert not matches(auto, wrong)
    must = tools.call_grammar(TOOLS, ToolChoice("required"), HERMES, THINK, False)
    assert matches(must, call + call)
    assert matches(must, "<think>hm</think>\n\n" + call)
    assert not matches(must, "hello")
    assert not matches(must, call + " and so on")
    assert not matches(must, call.replace(": {", ":" + " " * 9 + "{"))
    one = tools.call_grammar(TOOLS, ToolChoice("required", "f", False), HERMES, THINK, True)
    assert matches(one, "hm</think>\n" + call)
    assert not matches(one, "hm</think>\n" + call + call)
    listed = tools.call_grammar(TOOLS, ToolChoice("required"), MISTRAL, None, False)
    assert matches(listed, '[TOOL_CALLS][{"name": "g", "arguments": {"x": 2}}]')
    object_ = tools.structural(
        tools.after_reasoning(tools.as_format(Grammar("json_object", "")), THINK, False)
    )
    assert matches(object_, '<think>a</think>{"b": [1, {"c": null}]}')
    assert not matches(object_, "[1]")
    with pytest.raises(RequestError, match="cannot be compiled"):
        compile_grammar(Grammar("ebnf", "root ="))
