"""Chat templates are programs of a stranger: what they may make, how long they may take, and what common
ones need.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.cli.options import template_variables as given_variables
from nearfar.edge_runtime.openai.parameters import template_variables
from nearfar.edge_runtime.openai.prompts import ChatEncoder
from nearfar.edge_runtime.text import templates
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.edge_runtime.text.templates import ChatTemplate
from nearfar.errors import ArtifactError, RequestError
from tests.support import tiny
from tests.support.paths import ROOT

BOMBS = {
    "times": "{{ 'x' * 10**9 }}",
    "times list": "{{ ([0] * 10**9) | length }}",
    "times in a variable": "{% set n = messages[0]['content'] | length * 10**9 %}{{ 'x' * n }}",
    "power": "{{ 10 ** 10000000000 }}",
    "squares": "{% set ns = namespace(n=9) %}{% for _ in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ "  # noqa: E501
    "ns.n }}",
    "plus": "{% set ns = namespace(s='x') %}{% for _ in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ "  # noqa: E501
    "ns.s }}",
    "tilde": "{% set ns = namespace(s='x') %}{% for _ in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ "  # noqa: E501
    "ns.s }}",
    "block": "{% set ns = namespace(s='x') %}{% for _ in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset "  # noqa: E501
    "%}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(99) }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(60) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% "  # noqa: E501
    "endfor %}{% endfor %}",
    "long loops": "{% for a in range(99999) %}" + "{{ 'x' }}" * 1000 + "{% endfor %}",
    "recursion": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "center": "{{ 'x' | center(10**9) }}",
    "a method": "{{ 'x'.center(10**9) }}",
    "indent": "{{ 'x\ny' | indent(10**9) }}",
    "zeros": "{{ 'x'.zfill(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format of format": "{{ '{:{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace": "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "replace filter": "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "join": "{{ ('x' * 10**5) | join('y' * 10**5) }}",
    "join method": "{{ ('y' * 10**5).join('x' * 10**5) }}",
    "map": "{{ ['x'] | map('center', 10**9) | list }}",
    "json": "{{ [1] | tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "generation": "{% for a in range(10**9) %}{% generation %}x{% endgeneration %}{% endfor %}",
    "loops in generation": "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endgeneration %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "constant": "{{ 'x' | center(1000000000) }}",
}


def test_templates_that_make_too_much_are_refused() -> None:
    """In a process of its own, whose memory is bounded: a bomb that goes off ends only that."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from tests.unit.test_templates import defuse; defuse()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    outcome = {name: reason for name, reason in map(json.loads, done.stdout.splitlines())}
    assert outcome.keys() == {*BOMBS, "memory"}, f"it died after {list(outcome)[-1:]}: {done.stderr[-2000:]}"
    assert outcome.pop("memory") < 400 << 10, "kB more than before"
    for name, reason in outcome.items():
        assert reason.startswith("the model's chat template rejects"), f"{name}: {reason}"
        assert "MemoryError" not in reason, name


def defuse() -> None:
    """Render every one, and tell what came of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, source in BOMBS.items():
        try:
            made = TextCodec(tiny.tokenizer(), {}, source, None).render_chat(
                [{"role": "user", "content": "Hello"}]
            )
            print(json.dumps([name, f"rendered {len(made):,} characters"]), flush=True)
        except RequestError as error:
            print(json.dumps([name, str(error)]), flush=True)
    print(json.dumps(["memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))


def test_a_template_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.0)
    with pytest.raises(RequestError, match="longer than 0 seconds"):
        ChatTemplate("{% for a in range(200) %}{% endfor %}").render({})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'ab' * 3 ~ 1 ~ none }}", "ababab1None"),
        (
            "{{ 7 * 6 }} {{ 2 ** 10 }} {{ '%05.2f|%s' % (1.5, 'x') }} {{ [1] + [2] }}",
            "42 1024 01.50|x [1, 2]",
        ),
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ '.' if loop.last "
            "}}{% endfor %}",
            "1/2user2/2assistant.",
        ),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k }}{% else %}none{% endfor %}", "a"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        (
            "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ loop.previtem }}{{ x "
            "}}{% endfor %}",
            "123",
        ),
        (
            "{{ '{}-{:>4}'.format(1, 'a') }} {{ ', '.join(['a', 'b']) }} {{ [1, 2] | join('-') }}",
            "1-   a a, b 1-2",
        ),
        ("{{ messages | map(attribute='role') | join(' ') }}", "user assistant"),
        ("{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "1"),
        ("{{ 'a\nb' | indent(2) }} {{ ' x ' | trim }} {{ 'x'.replace('x', 'yy') }}", "a\n  b x yy"),
        ("{{ {'b': 1} | tojson(indent=1) }}", '{\n "b": 1\n}'),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor "
            "%}{{ ns.n }}",
            "10",
        ),
        (
            "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{% set b %}{{ m('c') }}{% endset %}{{ b }}",
            "<a><c>",
        ),
        ("{{ messages[::-1][0].role }} {{ 'a-b'.split('-')[-1] }} {{ x is defined }}", "assistant b False"),
        ("{{ 3000000000 | string | length }}", "10"),
        (  # SmolLM 3 and LFM 2.5 mark in this way what the model wrote
            "{% for m in messages %}{{ m.role }}{%- generation -%} {{ m.content }}{{ loop.index }}\n"
            "{% endgeneration %}|{% endfor %}",
            "usera1\n|assistantb2\n|",
        ),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        (
            "{% generation %}{% for m in messages %}{{ m.role }}{% break %}{% endfor %}{% endgeneration %}",
            "user",
        ),
    ],
)
def test_what_templates_need_still_works(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(source).render({"messages": messages}) == expected


def test_long_conversations_are_rendered() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}] * 20
    codec = TextCodec(
        tiny.tokenizer(),
        {},
        tiny.TEMPLATE.replace("m['content']", "m['content'].replace('word', 'words') | trim"),
        None,
    )
    assert len(codec.render_chat(messages)) > 2_000_000


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for x in y %}" * 200 + "{% endfor %}" * 200],
)
def test_a_template_that_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(ArtifactError, match="chat template cannot be read"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "value", [[1], [{"name": "default"}], [{"name": "default", "template": 3}], 7, {"default": "x"}]
)
def test_a_chat_template_of_another_type_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(
        ArtifactError, match=r"tokenizer_config.json of .* cannot be read: chat_template is .*expected a"
    ):
        open_with(tmp_path, {"tokenizer_config.json": json.dumps({"chat_template": value}).encode()})


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        ("chat_template.jinja", b"\xff\xfe{{", "utf-8"),
        ("tokenizer_config.json", b"\xff", "utf-8"),
        ("tokenizer_config.json", b"{", "Expecting"),
        ("tokenizer_config.json", b"[1]", "holds a list"),
        ("tokenizer_config.json", b"[" * 100_000, "recursion"),
        ("tokenizer.json", b"{}", "Model missing"),
        ("tokenizer.json", b"\xff", "utf-8"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_read_is_named(
    tmp_path: Path, file: str, data: bytes, reason: str
) -> None:
    with pytest.raises(ArtifactError, match=f"{file} of .* cannot be read.*{reason}"):
        open_with(tmp_path, {file: data})


def open_with(folder: Path, files: dict[str, bytes]) -> TextCodec:
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return TextCodec.open_directory(folder, None)


def test_variables_of_a_request_reach_the_template_and_take_nothing_s_place() -> None:
    source = "{{ bos_token }}{% if think %}[think {{ level }}]{% endif %}{{ messages[0]['content'] }}"
    codec = TextCodec(tiny.tokenizer(), {"bos_token": "<|bos|>"}, source, None)
    messages = [{"role": "user", "content": "Hi"}]

    def made(**variables: object) -> str:
        asked = template_variables({"chat_template_kwargs": variables})
        return codec.tokenizer.decode(
            ChatEncoder(codec, variables=asked)(messages), skip_special_tokens=False
        )

    assert made() == "<|bos|>Hi"
    assert made(think=True, level=3, unknown="x") == "<|bos|>[think 3]Hi"
    assert made(messages="others", bos_token="other", think=False) == "<|bos|>Hi"


@pytest.mark.parametrize(
    ("given", "read"),
    [("a=false", False), ("a=3", 3), ('a=["x", 1]', ["x", 1]), ("a=b=c", "b=c"), ("a=", "")],
)
def test_values_of_the_command_line_are_json_or_text(given: str, read: object) -> None:
    assert given_variables([given]) == {"chat_template_kwargs": {"a": read}}


def test_a_variable_without_a_value_is_refused() -> None:
    with pytest.raises(RequestError, match="give NAME=VALUE"):
        given_variables(["a"])


def test_the_variables_that_a_template_knows() -> None:
    source = (
        "{% if enable_thinking is defined and enable_thinking %}{{ bos_token }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{{ strftime_now('%Y') }}{% endfor %}"
        "{% set mine = style | default('plain') %}{{ mine }}{% if tools %}t{% endif %}"
    )
    assert ChatTemplate(source).asks_for() >= {"enable_thinking", "style", "messages"}
    assert TextCodec(tiny.tokenizer(), {}, source, None).template_variables() == ["enable_thinking", "style"]
    assert TextCodec(tiny.tokenizer(), {}, None, None).template_variables() == []
