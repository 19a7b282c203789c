"""Untrusted tokenizers, their configs and chat templates work, or are rejected with a message."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfar.edge_runtime.text.codec import TextCodec, TextStream
from nearfar.edge_runtime.text.templates import ChatTemplate
from nearfar.errors import NearfarError
from tests.fuzz.effort import effort
from tests.support import tiny
from tests.unit.test_text import byte_fallback

MESSAGES = [{"role": "system", "content": "Be ï."}, {"role": "user", "content": "Hi 😀"}]

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**64,
    1.5,
    "",
    "a",
    "▁",
    "é",
    "\ud800",
    "<|end|>",
    "ByteLevel",
    "BPE",
    "Unigram",
    "(",
    "x" * 5000,
    [],
    [1],
    ["a", "b"],
    {},
    {"type": "ByteFallback"},
    {"type": "Sequence", "decoders": []},
    {"content": 3},
)

PIECES = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m %}",
    "{% endif %}",
    "{% else %}",
    "{{ m['content'] }}",
    "{{ m }}",
    "{{ x.y.z }}",
    "{% set a = [1] * 99 %}",
    "{{ a }}",
    "{{ a | tojson }}",
    "{{ 'x' * 999999999 }}",
    "{{ messages | length }}",
    "{{ raise_exception('no') }}",
    "{% macro f(n) %}",
    "{% endmacro %}",
    "{{ f(f) }}",
    "{{ f(1) ~ f(2) }}",
    "{{ ''.__class__ }}",
    "{% break %}",
    "{{ range(99999) | list }}",
    "{{ 1 / 0 }}",
    "{{ [] | first | upper }}",
    "{% set m = messages %}",
    "{{ m.x() }}",
    "{{ bos_token }}",
    "{% include 'x' %}",
    "{{",
    "}}",
    "%}",
    "{{ loop.index }}",
    "{{ '%d' % 'x' }}",
    "{{ 'é😀\ud800' }}",
    "{{ messages | map('x') | list }}",
    "{{ strftime_now('%') }}",
    "{% raw %}",
    "text\n",
)


@cache
def tokenizer_files() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(made.to_str()) for made in (tiny.tokenizer(), byte_fallback()))


def use(folder: Path) -> None:
    """Open the files and do everything that a request does. Errors with a message are allowed, others are
    not.
    """
    with contextlib.suppress(NearfarError):
        codec = TextCodec.open_directory(folder, None)
        tokens = codec.encode("Hello ï 😀") + codec.encode("")
        stream = TextStream(codec, ["stop"], tokens[:3])
        for token in [*tokens, 0, 1, 300, 2**31 - 1]:
            stream.push(token)
            codec.token_bytes(token)
        stream.finish()
        codec.encode_chat(MESSAGES)
        codec.render_chat([*MESSAGES, {"role": "assistant", "content": "I"}], continue_last=True)


def altered(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one to three changes, near the top as often as in the long lists."""
    made = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        place = made
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
                place = inner
                continue
            if data.draw(st.integers(0, 3)) == 0:
                del place[key]
            else:
                place[key] = data.draw(st.sampled_from(HOSTILE))
            break
    return made


@effort(150)
@given(st.data())
def test_altered_tokenizers(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = altered(data, data.draw(st.sampled_from(tokenizer_files())))
        (Path(folder) / "tokenizer.json").write_text(json.dumps(made))
        use(Path(folder))


@effort(100)
@given(st.data())
def test_altered_configs(data: st.DataObject) -> None:
    templates = [{"name": "default", "template": tiny.TEMPLATE}]
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": templates}
    with tempfile.TemporaryDirectory() as folder:
        tiny.tokenizer().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(altered(data, config)))
        use(Path(folder))


@effort(100)
@given(
    st.binary(max_size=100),
    st.sampled_from(["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]),
)
def test_files_of_any_bytes(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny.tokenizer().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / name).write_bytes(content)
        use(Path(folder))


@effort(200)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_templates_of_any_pieces(pieces: list[str]) -> None:
    with contextlib.suppress(NearfarError):
        ChatTemplate("".join(pieces)).render({"messages": MESSAGES, "bos_token": "<s>"})


@pytest.mark.parametrize("seed", range(3))
def test_templates_of_any_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        source = "".join(rng.choice("{}%|~()[]'\"abmx.=+*-: \n\x00é") for _ in range(rng.randrange(60)))
        with contextlib.suppress(NearfarError):
            ChatTemplate(source).render({"messages": MESSAGES})
