"""A conversation in the terminal: input, commands, and growing markdown."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import Console

from nearfar.cli.session import commands
from nearfar.cli.session.commands import COMMANDS, parsed
from nearfar.cli.session.input import Lines
from nearfar.cli.session.markdown import MarkdownStream, closed
from nearfar.cli.session.screen import Screen
from nearfar.cli.session.session import Session
from nearfar.cli.session.settings import SETTINGS
from nearfar.edge_runtime import AsyncEngine, Engine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError, RequestError
from tests.support import tiny


class Talk:
    """A session with the tiny model, and its output."""

    def __init__(self, engine: Engine) -> None:
        self.said, self.wrong = io.StringIO(), io.StringIO()
        params: Any = {"max_tokens": 4, "temperature": 0.0, "stream_options": {"include_usage": True}}
        self.session = Session(engine, params, self._console(self.said), self._console(self.wrong))

    def _console(self, file: io.StringIO) -> Console:
        return Console(file=file, soft_wrap=True, width=200)

    def type(self, text: str) -> tuple[str, str]:
        """Type a line; gives the output and the errors."""
        for file in (self.said, self.wrong):
            file.truncate(0)
            file.seek(0)
        commands.run(self.session, text)
        return self.said.getvalue(), self.wrong.getvalue()

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.session.conversation]


@pytest.fixture
def talk() -> Iterator[Talk]:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    codec = TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256)
    with Engine(AsyncEngine(tiny.core(), codec)) as engine:
        yield Talk(engine)


def test_help_lists_every_command(talk: Talk) -> None:
    said, _ = talk.type("/help")
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("/")]
    assert listed == [f"/{name}" for name in COMMANDS]


def test_an_empty_question_says_what_to_do(talk: Talk) -> None:
    assert all("/help" in talk.type(text)[0] for text in ("", "  ", '"""\n"""'))
    assert talk.roles == []
    assert not talk.session.failed


def test_what_is_a_command_and_what_a_question() -> None:
    assert parsed("/save a file.json") == ("save", "a file.json")
    assert parsed("/bye") == ("exit", "")
    assert parsed("/system You are brief.\nAnd kind.") == ("system", "You are brief.\nAnd kind.")
    assert parsed("// of C\nint a;") == (None, "// of C\nint a;")
    assert parsed('"""/help"""') == (None, "/help")
    assert parsed('"""\n a\\\nb \n"""') == (None, " a\\\nb ")
    with pytest.raises(RequestError, match="no command /usr/bin"):
        parsed("/usr/bin")


def test_lines_of_a_pipe() -> None:
    lines = Lines(io.BytesIO(b'one\r\ntwo \\\nthree\n\n"""four\\\n\nfive"""\nsix\\'))
    read = [lines.read() for _ in range(6)]
    assert read == ["one", "two \nthree", "", '"""four\\\n\nfive"""', "six\n", None]
    with pytest.raises(RequestError, match="line 2 of stdin is not UTF-8: byte 1 is 0xff"):
        [each := Lines(io.BytesIO(b"a\nb\xff\n")), each.read(), each.read()]


def test_retry_gives_another_answer_to_the_same_question(talk: Talk) -> None:
    talk.type("Hello")
    first = talk.session.messages[-1]["content"]
    assert talk.roles == ["user", "assistant"]
    talk.type("/set temperature 2")
    talk.type("/set seed 5")
    talk.type("/retry")
    assert talk.roles == ["user", "assistant"]
    assert talk.session.messages[-1]["content"] != first
    assert "no question" in Talk(talk.session.engine).type("/retry")[1]


def test_a_refused_question_leaves_the_conversation_as_it_was(talk: Talk) -> None:
    talk.type("Hello")
    before = [*talk.session.messages]
    _, wrong = talk.type("x" * 200)
    assert "fits the context" in wrong
    assert "/reset" in wrong
    assert talk.session.messages == before
    assert talk.session.failed


def test_an_answer_that_is_cut_says_why(talk: Talk) -> None:
    assert (
        "cut" not in talk.type("Hello")[1]
    )  # a script asked for this number of tokens, so the cut needs no remark
    talk.session.stoppable = True
    assert "cut after 4 tokens: /set max_tokens default" in talk.type("/retry")[1]
    talk.session.params["max_tokens"] = None
    talk.session.params["seed"] = 3
    _, wrong = talk.type("Hello" * 3)
    assert talk.session.last is not None
    full = f"cut: the context of {talk.session.engine.context:,} tokens is full"
    assert full in wrong
    assert "/reset" in wrong
    assert "/set context_policy truncate-oldest" in wrong
    before = [*talk.session.messages]
    _, wrong = talk.type("And then?")
    assert "the conversation no longer fits the context" in wrong
    assert "/set context_policy truncate-oldest" in wrong
    assert "memory" not in wrong
    assert talk.session.messages == before
    talk.type("/set context_policy truncate-oldest")
    talk.type("/set max_tokens 4")
    assert "the oldest" in talk.type("And then?")[1]
    talk.type("/reset")
    assert "the question is too long" in talk.type("x" * 200)[1]


def test_a_question_that_a_device_left_open(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(talk.session.engine.chat.completions, "create", fail)
        assert "gone" in talk.type("Hello")[1]
    assert talk.roles == ["user"]
    talk.type("/retry")
    assert talk.roles == ["user", "assistant"]


def test_a_saved_conversation_is_loaded_again(talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert "nothing to save" in talk.type(f"/save {file}")[1]
    talk.type("/system Be brief.")
    talk.type("Hello")
    assert f"saved 3 messages to {file}" in talk.type(f"/save {file}")[0]
    saved = json.loads(file.read_text())
    assert saved == talk.session.conversation
    other = Talk(talk.session.engine)
    assert f"loaded 3 messages of {file}" in other.type(f"/load {file}")[0]
    assert other.session.conversation == saved
    assert other.session.system == "Be brief."
    file.write_text(json.dumps(saved[:2]))
    assert "/retry" in other.type(f"/load {file}")[0]
    other.type("/retry")
    assert other.session.conversation == saved


def test_files_that_are_no_conversation(talk: Talk, tmp_path: Path) -> None:
    talk.type("Hello")
    before = talk.session.conversation
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "give another name" in talk.type(f"/save {notes}")[1]
    assert notes.read_text() == "mine"
    assert "is not JSON" in talk.type(f"/load {notes}")[1]
    notes.write_text('[{"role": "user", "content": 3}]')
    assert "messages[0].content must be text" in talk.type(f"/load {notes}")[1]
    assert "cannot read" in talk.type(f"/load {tmp_path / 'none'}")[1]
    assert "cannot write" in talk.type(f"/save {tmp_path / 'no' / 'folder'}")[1]
    assert "/load FILE" in talk.type("/load")[1]
    assert talk.session.conversation == before


def test_system_prompts_start_afresh(talk: Talk) -> None:
    talk.type("Hello")
    assert "no system prompt" in talk.type("/system")[0]
    assert "the conversation starts afresh" in talk.type('/system """Be brief.\nBe kind."""')[1]
    assert "afresh" not in talk.type('/system """Be brief.\nBe kind."""')[1]
    assert talk.session.conversation == [{"role": "system", "content": "Be brief.\nBe kind."}]
    assert "Be kind." in talk.type("/system")[0]
    talk.type("/reset")
    assert talk.roles == ["system"]
    talk.type("/system default")
    assert talk.roles == []


def test_settings(talk: Talk) -> None:
    said, _ = talk.type("/set")
    assert [line.split()[0] for line in said.splitlines()] == list(SETTINGS)
    talk.type("/set top_k 7")
    assert talk.session.params["top_k"] == 7
    assert "7" in talk.type("/set top_k")[0]
    talk.type("/set top_k default")
    assert talk.session.params["top_k"] is None
    talk.type('/set stop ["a", "\\n"]')
    assert talk.session.params["stop"] == ["a", "\n"]
    talk.type("/set stop THE END")
    assert talk.session.params["stop"] == ["THE END"]
    kept = dict(talk.session.params)
    for wrong, message in {
        "/set temperature -1": "temperature must be a number in [0, 100]",
        "/set temperature hot": "'hot' is not a number",
        "/set top_p nan": "top_p must be",
        "/set max_tokens 1.5": "not a whole number",
        "/set stop [1": "is not JSON",
        "/set stop [1]": "stop",
        "/set context_policy forget": "context_policy must be",
        "/set markdown perhaps": "on or off",
        "/set heat 1": "there is no setting heat; there are temperature",
    }.items():
        assert message in " ".join(talk.type(wrong)[1].split()), wrong
    assert talk.session.params == kept


def test_speeds_on_request(talk: Talk) -> None:
    assert "no figures" in talk.type("/stats")[1]
    assert "tokens/s" not in talk.type("Hello")[1]
    assert "tokens/s" in talk.type("/stats")[1]
    talk.type("/stats on")
    assert "tokens/s" in talk.type("Hello")[1]
    talk.type("/stats off")
    assert "tokens/s" not in talk.type("Hello")[1]


def test_leaving(talk: Talk) -> None:
    for text in ("/exit", "/quit", "/bye"):
        with pytest.raises(commands.Leave):
            talk.type(text)


TEXT = """# Foxes

A fox is **red**, and
has *four* legs <b>or so</b>.

- one
- two

  still two

| a | b |
|---|---|
| 1 | 22 |

```python
for fox in foxes:
    print(fox)
```

The end: [here](https://example.org/x).
"""


def shown(pieces: list[str], lines: int = 40, **options: Any) -> list[str]:
    """The final content of a terminal, with everything that has scrolled by."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=lines, **options)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream._next = 0.0
        stream.push(piece)
    stream.end()
    screen = pyte.HistoryScreen(60, lines, history=1000)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    above = ["".join(row[x].data for x in range(60)) for row in screen.history.top]
    return [line.rstrip() for line in (*above, *screen.display)]


@pytest.mark.parametrize("lines", [40, 6])
def test_markdown_piece_by_piece_is_the_whole_once(lines: int) -> None:
    rng = random.Random(lines)
    pieces, rest = [], TEXT
    while rest:
        cut = rng.randint(1, 9)
        pieces.append(rest[:cut])
        rest = rest[cut:]
    said = " ".join(" ".join(shown(pieces, lines)).split())
    whole = " ".join(" ".join(shown([TEXT], lines)).split())
    assert said == whole
    for part in ("Foxes", "A fox is red, and", "<b>or so</b>", "• one", "still two", "22", "print(fox)"):
        assert said.count(part) == 1, part
    assert "https://example.org/x" in said
    assert "**" not in said
    assert "```" not in said


class Tty(io.TextIOWrapper):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()


def write(screen: Screen) -> None:
    with screen:
        screen.think("Hm.\x1b[2J")
        screen.write("One\x1b]0;title\x07 ")
        screen.write("two")


def test_a_terminal_gets_no_orders_and_a_last_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    out, aside = Tty(io.BytesIO(), encoding="utf-8"), Tty(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", aside)
    monkeypatch.setenv("TERM", "dumb")
    write(Screen())
    assert out.text == "One]0;title two\n"
    aside.flush()
    assert aside.text.startswith("Hm.[2J")


def test_a_pipe_gets_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out, aside = io.BytesIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding="utf-8"))
    monkeypatch.setattr("sys.stderr", aside)
    write(Screen(markdown=True))
    assert out.getvalue().decode() == "One\x1b]0;title\x07 two"
    assert aside.getvalue() == ""


def test_lines_of_the_text_stay_lines() -> None:
    text = [line for line in shown(["Roses are red,\nviolets are blue\n"]) if line]
    assert text == ["Roses are red,", "violets are blue"]


def test_a_block_is_closed_by_the_next() -> None:
    assert closed("a\n\nb") == ("a\n\n", "b")
    assert closed("a | b") == ("", "a | b")
    assert closed("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert closed("- a\n\n  b\n\nc\n") == ("- a\n\n  b\n\n", "c\n")
