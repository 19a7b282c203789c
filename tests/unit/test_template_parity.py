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
from tests.support import sample_tokenizers as samples
from tests.support.codec_server import ask
from tests.support.late import late

jinja2 = pytest.importorskip("jinja2")
transformers = late("transformers")

Case = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = (
    '{"b": 1.0, "id": 12345678901234567890, "10": [true, null, -0.5, 1e-7, 1E30], "2": {"z": "\\u00e9\\n😀", "1": {}}}'
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
    compare([case(template) for template in SNIPPETS])


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
    except Exception as error:  # whatever a template does
        return error


def of_python(asked: Case) -> str | Exception:
    try:
        return ChatTemplate(asked["template"]).render(variables(asked))
    except (ArtifactError, RequestError) as error:
        return error


EACH = "{%% for m in messages %%}[%s]{%% endfor %%}"
SNIPPETS = [
    *(EACH % f"{{{{ m.content{call} }}}}" for call in (
        "", ".strip()", ".strip('\\n')", ".lstrip('\\n')", ".rstrip('\\n')", ".strip(' \\n\\t')", ".lstrip()",
        ".rstrip()", "|trim", "|trim('\\n ')", ".split()", ".split('\\n')", ".split(' ', 1)", ".split(None, 1)",
        ".rsplit(None, 1)", ".rsplit(' ', 1)", ".splitlines()", ".partition(' ')", ".rpartition('i')",
        ".removeprefix('<b>')", ".removesuffix('İ')", ".upper()", ".lower()", ".title()", ".capitalize()",
        "|title", "|capitalize", "|upper", "|lower", ".replace('i', 'I')", ".replace('e', '', 1)", ".replace('', '-')",
        "|replace('i', 'é')", "|replace('i', 'é', 1)", ".find('i')", ".rfind('i')", ".count('i')", "[0]", "[-1]",
        "[2:5]", "[::-1]", "[-3:]", "[:-2]", "|length", "|reverse", "|list", "|first", "|last", "|tojson", "|string",
        "|e", "|escape", "|safe", "|wordcount", "|indent(2)", "|indent(2, true)", "|indent('> ', false, true)",
        ".startswith('<')", ".endswith(('x', 'İ'))", ".isdigit()", ".isalpha()", ".isspace()", ".isupper()", ".islower()",
        ".zfill(4)", ".center(9, '*')", ".ljust(9)", ".rjust(9)", "|center(9)", "|int", "|float", "|int(7)", "|default('x')",
        "|d('x', true)", "*2", " ~ 1 ~ none ~ true ~ 1.5", " in 'Be brief 12'", "|map('upper')|join",
        "|batch(3)|list", "|unique|list", "|sort|join", "|max", "|min",
    )),
    "{{ messages }}", "{{ messages[1:3] }}", "{{ messages[0].items() }}", "{{ messages[0].keys() }}",
    "{{ messages[0].values()|list }}", "{{ messages[0]|items|list }}", "{{ messages[0]|dictsort }}",
    "{{ tools }}{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ tools|tojson(ensure_ascii=True) }}",
    "{{ tools|tojson(sort_keys=true, separators=(',', ':')) }}{{ {}|tojson(indent=1) }}{{ [[], {}]|tojson(indent=4) }}",
    "{{ messages[2].tool_calls|tojson }}{{ messages[2].tool_calls }}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{{ v|tojson }}{% endfor %}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments|items %}{{ k }}={{ v is string }}{{ v is mapping }}"
    "{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is iterable }}{{ v is sequence }}{% endfor %}",
    "{% for t in tools %}{% for n, p in t.function.parameters.properties.items() %}{{ n }}{{ p }}{% endfor %}{% endfor %}",
    "{{ true }} {{ none }} {{ 1.0 }} {{ [1, 'a', \"it's\", none] }} {{ ('x',) }} {{ () }} {{ {'a': {1: 2}} }} {{ 1e20 }} {{ 1e-5 }}",
    "{{ 1 == 1.0 }} {{ [1] == [1.0] }} {{ (1, 2) == [1, 2] }} {{ true == 1 }} {{ 'a' < 'b' }} {{ 1 < 2 < 3 }} {{ '\ufffd' < '👋' }}",
    "{{ -7 % 3 }} {{ -7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 7 % -3 }} {{ -7.5 % 2 }} {{ 7.5 // 2 }} {{ 1 + 2 ~ 3 }} {{ 2**64 }}",
    "{{ 10 / 5 }} {{ 3 * 1.5 }} {{ 0.1 + 0.2 }} {{ 1_000 }} {{ 0x1f }} {{ 1e3 }} {{ -1|abs }} {{ not 1 in [1] }} {{ 1 in [1] and 2 not in [1] }}",
    "{{ 2.5|round }} {{ 3.5|round }} {{ 1.25|round(1) }} {{ 2.675|round(2) }} {{ 7|round }} {{ 1234.5|round(-2) }} {{ 1.21|round(1, 'ceil') }} {{ 42.55|round|int }}",
    "{{ '%s' % 1 }} {{ '%s-%d' % ('a', 2) }} {{ '%05.2f|%-6s|%+d|%x|%%' % (1.5, 'é', 3, 255) }} {{ '%s %s'|format(1, none) }} {{ '%.1f' % 0.25 }}",
    "{{ '{} {}'.format(1, 'a') }} {{ '{1}{0}{x}{{'.format(1, 2, x=3) }} {{ ', '.join(['a', 'b']) }}",
    "{% for m in messages %}{% if m == messages[-1] %}LAST{% endif %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}"
    "{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role }}{{ loop.nextitem.role if loop.nextitem is defined }}"
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}".replace("loop.previtem.role", "loop.previtem.role if loop.previtem"),
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}",
    "{% set ns = namespace(found=false) %}{% for m in messages if not ns.found %}{{ m.role }}{% if m.role == 'user' %}{% set ns.found = true %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.index == 4 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(n=0, items='i') %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}{{ ns.items }}{{ ns.missing is defined }}",
    "{% macro m(a, b=2, c='x') %}<{{ a }}{{ b }}{{ c }}{{ messages|length }}>{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=1, a=2)|upper }}{{ m() }}",
    "{% macro m() %}({{ caller('z') }}){% endmacro %}{% call(x) m() %}in {{ x }}{% endcall %}",
    "{% filter upper|replace('A', 'b') %}a{% set q = 1 %}{{ 'c' }}{% endfilter %}{{ q is defined }}",
    "{% set b %} a {{ 1 }} {% endset %}[{{ b }}]{% set c | trim | upper %} x {% endset %}[{{ c }}]",
    "{% with a = 1, b = 2 %}{{ a + b }}{% set z = 3 %}{% endwith %}{{ z is defined }}",
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set (c, d) = [1, 2] %}{{ c }}{% for k, (x, y) in [(1, (2, 3))] %}{{ k }}{{ x }}{{ y }}{% endfor %}",
    "{% for a in [[1, [2]], [3]] recursive %}({{ a if a is number else loop(a) }}{{ loop.depth }}){% endfor %}",
    "a\n  {% if true %}  \n b\n  {%- if true %} c {% endif -%} \n d {%+ if true %}e{% endif +%}\n  {# x #}\n f {{- 'g' -}} \n h{% raw %} {{ x }}\n{% endraw %}\ni{% endif %}\n",
    "{% for m in messages %}\r\n{{ m.role }}\r\n{% endfor %}\r\nx\ry\r\n", "x\n\n", "{{ 'a\\n\\t\\x41\\u00e9\\q\\101' \"b\" }}", "{{ 'a\r\nb'|length }}",
    "{% print 1, 2 %}{% if false %}{% elif messages %}b{% else %}c{% endif %}{{ 'x' if false }}{{ (1 if true else 2) + 1 }}",
    "{{ x is defined }}{{ x }}{{ x|default('d') }}{{ x is none }}{{ none is none }}{{ x|length }}{% for y in x %}{% endfor %}{{ x ~ 'a' }}{{ x == y }}{{ 'a' in x }}",
    "{{ x.y }}", "{{ x['y'] }}", "{{ x() }}", "{{ x + 1 }}", "{{ none + 'a' }}", "{{ 'a' + 1 }}", "{{ none|length }}", "{{ none.x is defined }}", "{{ messages.x is defined }}{{ messages[99] is defined }}{{ 'abc'[9] is defined }}",
    "{{ 1 / 0 }}", "{{ x < 1 }}", "{{ raise_exception('no: ' ~ messages|length) }}", "{{ x|foo }}", "{{ 1 is foo }}", "{{ messages|join('a', 'role', 3) }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ messages|map(attribute='none', default='x')|list }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|rejectattr('tool_calls', 'defined')|map(attribute='content.0')|list }}{{ messages|selectattr('tool_calls')|list|length }}{{ [1, 2, 3]|select('odd')|list }}{{ [0, 1]|reject|list }}",
    "{% if messages|selectattr('role', 'equalto', 'nobody') %}always{% endif %}", "{{ messages|selectattr('role')|length }}",
    "{{ [3, 1, 2]|sort }}{{ ['b', 'A', 'c']|sort }}{{ ['b', 'A']|sort(case_sensitive=true) }}{{ messages|sort(attribute='role,content')|map(attribute='role')|list }}{{ [1, 2]|sort(reverse=true) }}",
    "{{ [3, 1]|max }}{{ [3, 1]|min }}{{ []|max is defined }}{{ [1, 2.5]|sum }}{{ messages|sum(attribute='n') if false }}{{ ['a', 'A', 'b']|unique|list }}{{ [1, 2, 3]|last }}{{ [1, 2, 3]|first }}{{ []|first is defined }}",
    "{{ range(3) }}{{ range(1, 10, 3)|list }}{{ range(5, 0, -2)|list }}{{ range(3)[1] }}{{ range(4)|length }}{{ 2 in range(3) }}",
    "{{ dict(a=1, b=2) }}{{ dict({'x': 1}) }}{{ {'a': 1, 'b': none}.get('b', 2) }}{{ {'a': 1}.get('c') }}{{ {'a': 1}.get('c', 'd') }}{{ {'items': 1}.items is defined }}{{ {'items': 1}['items'] }}",
    "{% set j = joiner(' | ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{{ messages[0]|attr('role') is defined }}{{ messages|length is divisibleby 2 }}{{ messages|length is even }}{{ 3 is odd }}{{ 'a' is in 'abc' }}{{ 1 is eq 1.0 }}{{ none is sameas none }}{{ 'A' is upper }}",
    "{{ [1, 2] + [3] }}{{ [1] * 3 }}{{ 'ab' * 2 }}{{ (1,) + (2,) }}{{ [1, 2, 3][::-1] }}{{ [1, 2, 3, 4][1:-1] }}{{ [1, 2].index(2) }}{{ [1, 1].count(1) }}",
    "{{ [1].append(2) }}", "{{ {'a': 1}.update({'b': 2}) }}", "{{ messages[2].tool_calls[0].function.arguments.keys()|list }}", "{{ '5'|int + 1 }}{{ '5.7'|int }}{{ ' 7 '|int }}{{ 'x'|int }}{{ 3.9|int }}{{ none|int }}{{ true|int }}{{ '1e3'|float }}{{ 'inf'|float }}",
    "{{ 'a' 'b' }}{{ {'a': 1,} }}{{ [1,] }}{{ 'x'.upper().lower() }}{{ 'x' is string }}{{ messages is iterable }}{{ 1.0 is float }}{{ true is boolean }}{{ true is number }}{{ 'ab'|list|tojson }}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}", "{{ 'a'|tojson|safe }}{{ '<'|e ~ '>' if false }}", "{{ messages|tojson|length }}", "{{ 1.0|tojson }}{{ [1.5, 1e100, -0.0]|tojson }}",
    "{{ '5' in '15' }}{{ none == false }}{{ '' == none }}{{ 0 == false }}{{ {} == {} }}{{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }}",
]  # fmt: skip


def test_what_transformers_trains_on_is_marked_by_tags_that_say_nothing() -> None:
    asked = case("{% generation %}a {{ 1 }}{% endgeneration %}{%- generation -%} b {%- endgeneration -%} c")
    assert ask({"render": [asked]}) == [of_transformers(asked)] == ["a 1bc"]


def test_the_build_knows_what_the_web_engine_knows() -> None:
    web = ask({"vocabulary": True})
    assert {name: known()[name] for name in web} == web


def test_what_is_rendered_alike_passes_the_build() -> None:
    """But for what transformers refuses as well."""
    refused = {template: found for template in SNIPPETS if (found := unknown_in(template))}
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
        ("{{ x.__class__ }}", "the attribute '__class__' in line 1"),
        ("{{ lipsum() }}", "the function 'lipsum' in line 1"),
        ("{{ strftime_now('%s') }}", "'%s' of strftime_now in line 1"),
        ("{{ '%e' % 1 }}", "the format '%e' in line 1"),
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


STRFTIME = "|".join(f"%{code}" for code in "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ%") + "|%-d|%_m|%-I|%^a|%-j"


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


NAMES = ("messages", "m", "m.content", "m.role", "tools", "x", "n", "ns.v", "bos_token", "m.tool_calls", "loop.index")
CONSTANTS = (
    "0", "1", "-3", "7", "2.0", "0.5", "12345678901234567890", "true", "none", "''", "'a'", "' b\\n'", "'é👋'", "[]", "{}",
    "[1, 'a']", "(1, none)", "{'a': 1, '1': 2.0}",
)  # fmt: skip
UNARY = (
    "-({a})", "not {a}", "({a})|trim", "({a})|length", "({a})|string", "({a})|upper", "({a})|tojson", "({a})|list",
    "({a})|first", "({a})|last", "({a})|int", "({a})|float", "({a})|round", "({a})|sort", "({a})|default('d', true)",
    "({a})|join(',')", "({a})|reverse|list", "({a})|replace('a', 'bb')", "({a})|items|list", "({a})|dictsort", "({a})|abs",
    "({a})|title", "({a})|capitalize", "({a})|indent", "({a})|unique|list", "({a})|max", "({a})|sum", "({a})|map('string')|list",
    "({a}).strip()", "({a}).split('a')", "({a}).split()", "({a}).keys()|list", "({a}).get('a')", "({a}).lstrip(' \\n')",
    "({a}).splitlines()", "({a})[0]", "({a})[-1]", "({a})['a']", "({a}).a", "({a})[1:]", "({a})[::-1]", "({a})[:-1]",
    "({a}) is defined", "({a}) is none", "({a}) is string", "({a}) is mapping", "({a}) is iterable", "({a}) is number",
    "({a}) is sequence", "({a}) is integer", "({a}) is boolean", "({a}) is true", "[{a}, 1]", "{{'k': {a}}}", "({a},)",
    "('%s' % ({a},))", "'{{}}'.format({a})", "range({a})|list", "({a})|batch(2)|list", "({a})|wordcount", "({a})|e",
)  # fmt: skip
BINARY = (
    "({a} + {b})", "({a} - {b})", "({a} * {b})", "({a} / {b})", "({a} // {b})", "({a} % {b})", "({a} ~ {b})", "({a} == {b})",
    "({a} != {b})", "({a} < {b})", "({a} >= {b})", "({a} in {b})", "({a} not in {b})", "({a} and {b})", "({a} or {b})",
    "({a} if {b} else 'no')", "({a})|default({b})", "({a})[{b}]", "({a})|join({b})", "({a}).startswith({b})",
    "{a} + {b} ~ {a}", "{a} * {b} - {b} // 2", "-{a} ** 2", "not {a} in {b}", "{a}|string + {b}|string", "({a})|select('eq', {b})|list",
)  # fmt: skip
STATEMENTS = (
    "{{{{ {a} }}}}", " \n  {{%- if {a} -%}} y \n{{% else %}}\n n {{%- endif %}}\n", "{{% for x in {a} %}}{{{{ x }}}};{{% endfor %}}",
    "  {{% set x = {a} %}}\n{{{{ x }}}}", "{{% set ns.v = {a} %}}{{{{ ns.v }}}}", "{{% for x in {a} if {b} %}}{{{{ loop.index ~ loop.last }}}}{{% else %}}-{{% endfor %}}",
    "{{% set b %}}{{{{ {a} }}}} {{% endset %}}{{{{ b|trim }}}}", "\r\n{{#- c -#}}\t{{%+ if {a} %}}\n{{% endif +%}} \n",
    "{{% for k, v in ({a})|items %}}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}", "{{% filter upper %}}{{{{ {a} }}}}{{% endfilter %}}",
)  # fmt: skip


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.integers(0, 3 if depth else 0))
    if kind == 0:
        return draw(st.sampled_from((*NAMES, *CONSTANTS)))
    first = draw(expressions(depth - 1))
    if kind < 3:
        return draw(st.sampled_from(UNARY)).format(a=first)
    return draw(st.sampled_from(BINARY)).format(a=first, b=draw(expressions(depth - 1)))


@st.composite
def templates(draw: st.DrawFn) -> str:
    count = draw(st.integers(1, 3))
    parts = [
        draw(st.sampled_from(STATEMENTS)).format(a=draw(expressions()), b=draw(expressions(1))) for _ in range(count)
    ]
    begin = "{% set ns = namespace(v=1) %}{% set n = 2 %}{% for m in messages %}"
    return begin + "".join(parts) + "{% endfor %}"


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)
KEYS = st.one_of(st.sampled_from(("a", "items", "10", "2", "")), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)), max_leaves=6
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Case]:
    content = st.text(alphabet=st.one_of(st.sampled_from(" \n\r\ta👋\ufeff\x85'\"<"), st.characters(codec="utf-8")), max_size=12)
    made: list[Case] = [{"role": "user", "content": draw(content)}]
    if draw(st.booleans()):
        given = json.dumps(draw(st.dictionaries(KEYS, VALUES, max_size=3)), ensure_ascii=draw(st.booleans()))
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        made += [{"role": "assistant", "content": draw(content), "tool_calls": [call]}]
        made += [{"role": "tool", "tool_call_id": "c", "content": draw(content)}]
    return made


@effort(120)
@given(st.lists(templates(), min_size=4, max_size=4), conversations())
def test_made_up_templates_and_conversations(made: list[str], messages: list[Case]) -> None:
    compare([case(template, messages=messages) for template in made], may_refuse=True)
