"""Chat templates: transformers, nearfar's Python and the browser make the same text of a conversation.

The browser may refuse what Python renders only where the build refuses the template for it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.build.browser.templates import known, unknown_in
from nearfar.edge_runtime.text.templates import ChatTemplate
from nearfar.edge_runtime.tools.messages import with_parsed_arguments
from nearfar.errors import ArtifactError, RequestError
from tests.fuzz.effort import effort
from tests.support import sample_templates as pieces
from tests.support import sample_tokenizers as samples
from tests.support.codec_server import ask
from tests.support.late import late

jinja2 = pytest.importorskip("jinja2")
transformers = late("transformers")

Case = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = (
    '{"b": 1.0, "id": 12345678901234567890, "10": [true, null, -0.5, 1e-7, 1E30], '
    '"2": {"z": "\\u00e9\\n😀", "1": {}}}'
)
CALLS = [
    {"role": "system", "content": "Be brief.\r\nPlease."},
    {"role": "user", "content": " \n\u0085\ufeff 👋 “Hi” 'there' \"you\"\\ \u2028\x1f "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}},
            {"id": "c2", "type": "function", "function": {"name": "items", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12"},
    {"role": "assistant", "content": "\n    indented\n\ttwo \n"},
    {"role": "user", "content": "<b>&amp;</b> ß ŉ İ"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does é <it>",
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "number", "minimum": 0.5}, "keys": {"type": "string"}},
                "required": ["b"],
            },
        },
    }
]


def test_what_templates_write_is_what_transformers_writes() -> None:
    compare([case(template) for template in pieces.SNIPPETS])


def compare(cases: list[Case], may_refuse: bool = False) -> None:
    answers = zip(cases, ask({"render": cases}), strict=True)
    wrong = [found for asked, ours in answers if (found := difference(asked, ours, may_refuse))]
    assert not wrong, "\n".join(wrong)


def difference(asked: Case, ours: Any, may_refuse: bool) -> str:
    """What is not the same; nothing where all make the same text, or all refuse."""
    theirs, python = of_transformers(asked), of_python(asked)
    if isinstance(theirs, str):
        refused = may_refuse and "in the browser" in str(ours)
        same = python == theirs and (ours == theirs or refused)
    else:
        same = not isinstance(python, str) and not isinstance(ours, str)
    return "" if same else f"{asked['template']!r}\n  {theirs!r}\n  {python!r}\n  {ours!r}"


def case(template: str, **more: Any) -> Case:
    usual = {"messages": CALLS, "tools": TOOLS, "tokens": TOKENS, "addGenerationPrompt": True}
    return {"template": template + "{#- tools #}", **usual, **more}


def variables(asked: Case) -> dict[str, Any]:
    messages = [with_parsed_arguments(message) for message in asked["messages"]]
    tools = {"tools": asked["tools"]} if asked["tools"] else {}
    prompt = asked["addGenerationPrompt"]
    given = {**asked.get("variables", {}), **asked["tokens"], **tools}
    return {**given, "messages": messages, "add_generation_prompt": prompt}


def of_transformers(asked: Case) -> str | Exception:
    try:
        compiled = transformers.utils.chat_template_utils._compile_jinja_template(asked["template"])
        return str(compiled.render(**variables(asked)))
    except Exception as error:  # a template may raise any error
        return error


def of_python(asked: Case) -> str | Exception:
    try:
        return ChatTemplate(asked["template"]).render(variables(asked))
    except (ArtifactError, RequestError) as error:
        return error


def test_what_transformers_trains_on_is_marked_by_tags_that_say_nothing() -> None:
    asked = case("{% generation %}a {{ 1 }}{% endgeneration %}{%- generation -%} b {%- endgeneration -%} c")
    assert ask({"render": [asked]}) == [of_transformers(asked)] == ["a 1bc"]


def test_the_build_knows_what_the_web_engine_knows() -> None:
    web = ask({"vocabulary": True})
    assert {name: known()[name] for name in web} == web


def test_what_is_rendered_alike_passes_the_build() -> None:
    """Snippets that transformers refuses as well do not count."""
    refused = {template: found for template in pieces.SNIPPETS if (found := unknown_in(template))}
    assert not {
        template: found
        for template, found in refused.items()
        if isinstance(of_transformers(case(template)), str)
    }


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 }}\n{{ x|pprint }}", "the filter 'pprint' in line 2"),
        ("{{ x|map('pprint') }}", "the filter 'pprint' in line 1"),
        ("{{ x|int(base=16) }}", "the argument 'base' of the filter 'int' in line 1"),
        ("{{ ('<'|e) + x }}", "the filter 'e' before another operation in line 1"),
        ("{{ x|selectattr('a', 'filter') }}", "the test 'filter' in line 1"),
        ("{{ 1 is filter }}", "the test 'filter' in line 1"),
        ("{{ x.casefold() }}", "the method 'casefold' in line 1"),
        ("{{ x.startswith('a', 1) }}", "these arguments of the method 'startswith' in line 1"),
        ("{{ x|default(undefined) }}", "the undefined default of the filter 'default' in line 1"),
        ("{{ x.replace(old='a', new='b') }}", "arguments by name of the method 'replace' in line 1"),
        ("{{ x.get(key='a') }}", "arguments by name of the method 'get' in line 1"),
        ("{{ x.__class__ }}", "the attribute '__class__' in line 1"),
        ("{{ cycler('a') }}", "the function 'cycler' in line 1"),
        ("{% print 1 %}", "the tag print in line 1"),
        ("{{ lipsum() }}", "the function 'lipsum' in line 1"),
        ("{{ strftime_now('%V') }}", "'%V' of strftime_now in line 1"),
        ("{{ '%5d' % 1 }}", "the format '%5d' in line 1"),
        ("{{ '{:>4}'.format(1) }}", "format() with more than plain fields in line 1"),
        ("{% block a %}{% endblock %}", "a Block node in line 1"),
        ("{% include 'x' %}", "a Include node in line 1"),
        ("{{ '\\N{EN DASH}' }}", "an escape \\N{…} of a text in line 1"),
        ("{{ {1.5: 2} }}", "a key of a dict that is neither a text nor a whole number in line 1"),
        ("{% macro m() %}{{ varargs }}{% endmacro %}", "varargs of a macro in line 1"),
    ],
)
def test_what_the_web_engine_lacks_is_named(template: str, told: str) -> None:
    assert told in unknown_in(template)


def test_published_forms_of_templates() -> None:
    compare([case(template) for template in samples.TEMPLATES.values()])


STRFTIME = "|".join(f"%{code}" for code in "aAbBcdDeFhHIjmMpSTxXyYzZ%") + "|%-d|%_m|%-I|%^a|%-j"


@pytest.mark.parametrize("now", ["2024-12-30T09:05:07", "2021-01-03T23:59:01", "2026-02-09T00:00:00"])
def test_times_are_written_as_in_python(monkeypatch: pytest.MonkeyPatch, now: str) -> None:
    moment = datetime.fromisoformat(now)

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return moment

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Frozen)
    monkeypatch.setattr("nearfar.edge_runtime.text.templates.datetime", Frozen)
    compare([case(f"{{{{ strftime_now({json.dumps(STRFTIME)}) }}}}", now=moment.timestamp() * 1000)])


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.integers(0, 3 if depth else 0))
    if kind == 0:
        return draw(st.sampled_from((*pieces.NAMES, *pieces.CONSTANTS)))
    first = draw(expressions(depth - 1))
    if kind < 3:
        return draw(st.sampled_from(pieces.UNARY)).format(a=first)
    return draw(st.sampled_from(pieces.BINARY)).format(a=first, b=draw(expressions(depth - 1)))


@st.composite
def templates(draw: st.DrawFn) -> str:
    count = draw(st.integers(1, 3))
    parts = [
        draw(st.sampled_from(pieces.STATEMENTS)).format(a=draw(expressions()), b=draw(expressions(1)))
        for _ in range(count)
    ]
    begin = "{% set ns = namespace(v=1) %}{% set n = 2 %}{% for m in messages %}"
    return begin + "".join(parts) + "{% endfor %}"


CHARACTERS = st.characters(exclude_categories=("Cn", "Cs"))
"""Without those that another version of Unicode may know."""
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(CHARACTERS, max_size=8),
)
KEYS = st.one_of(st.sampled_from(("a", "items", "10", "2", "")), st.text(CHARACTERS, max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=6,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Case]:
    content = st.text(
        alphabet=st.one_of(st.sampled_from(" \n\r\ta👋\ufeff\x85'\"<"), CHARACTERS),
        max_size=12,
    )
    made: list[Case] = [{"role": "user", "content": draw(content)}]
    if draw(st.booleans()):
        given = json.dumps(draw(st.dictionaries(KEYS, VALUES, max_size=3)), ensure_ascii=draw(st.booleans()))
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        made += [{"role": "assistant", "content": draw(content), "tool_calls": [call]}]
        made += [{"role": "tool", "tool_call_id": "c", "content": draw(content)}]
    return made


@effort(40)
@given(st.lists(templates(), min_size=4, max_size=4), conversations())
def test_made_up_templates_and_conversations(made: list[str], messages: list[Case]) -> None:
    compare([case(template, messages=messages) for template in made], may_refuse=True)
