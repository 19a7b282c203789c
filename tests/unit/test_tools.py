"""Requesting and reading calls, in cases that tests/vectors/tools does not cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.tools.formats import shown_format
from nearfar.edge_runtime.tools.reading import AnswerReader, Fragment
from nearfar.errors import ArtifactError
from nearfar.format.answers import AnswerFormat
from tests.support import tiny

CALL = '{"name": "f", "arguments": {"x": 1}}'
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
HERMES = shown_format("tools <tool_call> <think>")
LLAMA = shown_format("tools <|python_tag|>")
NAMED = shown_format("tools [TOOL_CALLS] [ARGS]")
HARMONY = shown_format("<|channel|> <|message|>")
MARKED = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "\n", "<", "a ", "<tool", "_call>", "é",
         "[TOOL_CALLS]", "f[ARGS]{}", "<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>assistant",
         "commentary to=functions.", "final", "<|call|>", "<|end|>"]
    ),
    max_size=12,
)  # fmt: skip


def read(parts: list[str], form: AnswerFormat, tools: list[dict[str, Any]] = TOOLS) -> list[Fragment]:
    """All fragments, with neighbours of the same kind joined."""
    reader = AnswerReader(form, tools)
    made: list[Fragment] = []
    for one in [one for part in parts for one in reader.push(part)] + reader.finish():
        if made and made[-1].kind == one.kind:
            made[-1] = Fragment(one.kind, made[-1].text + one.text)
        else:
            made.append(one)
    return made


@given(MARKED, st.randoms(use_true_random=False), st.sampled_from([HERMES, LLAMA, NAMED, HARMONY]))
def test_where_the_text_is_cut_does_not_matter(words: list[str], random: Any, form: AnswerFormat) -> None:
    text = "".join(words)
    cuts = sorted(random.randint(0, len(text)) for _ in range(random.randint(0, 8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts, form) == read([text], form)


@given(st.text(alphabet="<>think/ab", max_size=40))
def test_without_whole_marks_no_text_is_lost(text: str) -> None:
    if "<think>" not in text:
        assert "".join(one.text for one in read(list(text), HERMES)) == text


@given(st.text(max_size=60), st.sampled_from(["{", "[", "<function=f>\n<parameter=x>\n", "call:f{x:"]))
def test_no_section_stops_the_reader(text: str, begun: str) -> None:
    for template in (
        "<tool_call> <function= <parameter=",
        "<|tool_call>",
        "[func_name1(",
        "[TOOL_CALLS][ARGS]",
    ):
        form = shown_format(template)
        assert form.calls is not None
        read([form.calls.begin + begun + text + form.calls.end], form)


RESPONSE_TEMPLATES: dict[str, Any] = {
    "hermes": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": "\\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
    "gemma4": {
        "tool_calls": {
            "open_pattern": "<\\|tool_call>call:(?P<name>\\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<|\"|>", "<|\"|>"]]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
    "qwen-xml": {
        "tool_calls": {
            "open_pattern": "\\s*<tool_call>\\s*<function=(?P<name>[^>\\n]+)>",
            "close_pattern": "</function>\\s*</tool_call>", "repeats": True, "content": "xml-inline",
            "content_args": {
                "tag_pattern": "<parameter=(?P<key>[^>\\n]+)>\\s*(?P<value>.*?)\\s*</parameter>"
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("family", RESPONSE_TEMPLATES)
def test_a_response_template_tells_the_format(family: str) -> None:
    signs = {
        "hermes": "<tool_call>",
        "gemma4": "<|tool_call>",
        "qwen-xml": "<tool_call> <function= <parameter=",
    }
    told = shown_format("", {"response_template": {"fields": RESPONSE_TEMPLATES[family]}})
    assert told.calls == shown_format(signs[family]).calls


def test_a_response_template_that_cannot_be_told_leaves_the_chat_template_to_tell() -> None:
    other = {"fields": {"tool_calls": {"open_pattern": "<(a|b)>", "close": "</a>", "content": "kv-lines"}}}
    assert shown_format("tools [TOOL_CALLS]", {"response_template": other}).family == "mistral"
    with pytest.raises(ArtifactError, match="response_template"):
        shown_format("", {"response_template": "x"})


def test_special_tokens_of_marks_are_text(tmp_path: Path) -> None:
    data = json.loads(tiny.tokenizer().to_str())
    first = max(token["id"] for token in data["added_tokens"]) + 1
    for number, content in enumerate(["<|python_tag|>", "<|other|>"]):
        data["added_tokens"].append({**data["added_tokens"][0], "id": first + number, "content": content})
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}<|python_tag|>")
    codec = TextCodec.open_directory(tmp_path, None)
    assert codec.decode([first, first + 1]) == "<|python_tag|>"
    assert {first, first + 1} & codec.silent == {first + 1}
