"""`nearfar` as a person uses it in a terminal, and as a script uses it in a pipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from tests.shared_data import shared_data
from tests.support import commands
from tests.support.late import late
from tests.support.servers import RunningServer
from tests.support.terminal import PASTE, Terminal
from tests.unit.test_server_requests import EchoEngine

chat_types, text_types = late("openai.types.chat"), late("openai.types.completion")

DRAW = ("--temperature", "0", "--max-tokens", "12")
COLOURS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instruct model for MLX, which compiles nothing."""
    out = tmp_path_factory.mktemp("classics")
    build(BuildOptions(str(shared_data("models", "classics-1M")), out, ("mlx",), "none"))
    return out


def nearfar(*arguments: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nearfar", *map(str, arguments)]
    settings = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, timeout=120, input=stdin, check=False, env=settings)


def asked(text: str, count: int) -> bool:
    """Whether `count` prompts have been shown, and the last one waits for input."""
    return text.count("›") >= count and text.splitlines()[-1].startswith("›")


def test_a_session(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal("chat", model, *DRAW, home=tmp_path) as terminal:
        terminal.until("/help lists the commands")
        terminal.until("a question, or /help")
        terminal.send("\r")
        terminal.until("type a question and press Enter")
        terminal.send(PASTE.format("first line\r/second \\\rthird"))
        terminal.until("… third")  # a pasted text is one message, and is not sent
        terminal.send("\r")
        terminal.until(lambda text: asked(text, 3))
        terminal.send("a\\\rb\x1b\rc\r")
        terminal.until(lambda text: asked(text, 4))
        terminal.send(f"/save {saved}\r")
        terminal.until("saved 4 messages")
        terminal.send("/sta\t")
        terminal.until("› /stats")
        terminal.send("\r")
        terminal.until("tokens/s")
        terminal.send("\x04")
        assert terminal.end() == 0
    questions = [message["content"] for message in json.loads(saved.read_text()) if message["role"] == "user"]
    assert questions == ["first line\n/second \\\nthird", "a\nb\nc"]

    history = tmp_path / "data" / "chat-history"
    assert history.stat().st_mode & 0o077 == 0
    with Terminal("chat", model, *DRAW, home=tmp_path, NO_COLOR="1") as terminal:
        terminal.until("a question, or /help")
        terminal.send("\x1b[A\x1b[A")
        terminal.until(f"› /save {saved}")  # the line was typed in an earlier session
        terminal.send("\x03")
        terminal.until("Ctrl-D or /exit leaves")
        terminal.send("\x12second")
        found = terminal.until(lambda text: "second \\" in text.rpartition("leaves")[2])
        assert "/help" not in found.rpartition("leaves")[2]  # the placeholder is for an empty line
        terminal.send("\r")
        terminal.until(lambda text: "I-search" not in text)
        # the line that was found is taken, and not sent
        assert "› first line" in terminal.text.rpartition("leaves")[2]
        terminal.send("\x03")
        terminal.until(lambda text: text.count("Ctrl-D or /exit leaves") == 2)
        terminal.send("/nothing\r")
        terminal.until("no command /nothing")
        terminal.send("/set heat 1\r")
        terminal.until("repetition_penalty")  # a line of the terminal ends between words
        terminal.send("/bye\r")
        assert terminal.end() == 0  # the user has seen the error, so the session ends well
        assert not COLOURS.search(terminal.raw)


def test_an_answer_that_is_stopped_stays(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal("chat", model, "--no-history", "--temperature", "0", home=tmp_path) as terminal:
        terminal.until("a question, or /help")
        terminal.send("Hello\r")
        terminal.until("› Hello")
        terminal.until(lambda text: len(text.rpartition("› Hello")[2].split()) > 3)
        terminal.send("\x03")
        terminal.until(lambda text: asked(text, 2))
        terminal.send(f"/save {saved}\r")
        terminal.until("saved 2 messages")
        terminal.send("/exit\r")
        assert terminal.end() == 0
    assert json.loads(saved.read_text())[1]["content"]
    assert not (tmp_path / "data" / "chat-history").exists()


def test_the_last_line_break_is_the_terminals(model: Path, tmp_path: Path) -> None:
    piped = nearfar("run", model, "Hello", *DRAW)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout
    assert not piped.stdout.endswith(b"\n")
    assert b"\x1b" not in piped.stdout + piped.stderr
    with Terminal("run", model, "Hello", *DRAW, home=tmp_path) as terminal:
        assert terminal.end() == 0
        assert terminal.raw.endswith(b"\r\n")
        assert piped.stdout.decode().split() == terminal.text.split()[-len(piped.stdout.split()) :]


def test_a_response_as_json(model: Path) -> None:
    text = nearfar("run", model, "Hello", *DRAW).stdout.decode()
    made = chat_types.ChatCompletion.model_validate_json(
        nearfar("run", model, "Hello", *DRAW, "--json").stdout
    )
    assert made.choices[0].message.content == text
    assert made.usage is not None
    assert made.usage.completion_tokens == 12
    assert made.choices[0].finish_reason == "length"

    done = nearfar("run", model, "Hello", *DRAW, "--json", "--stream", "--stats")
    chunks = [chat_types.ChatCompletionChunk.model_validate_json(line) for line in done.stdout.splitlines()]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == made.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert b"tokens/s" in done.stderr

    raw = nearfar("run", model, "Hello", *DRAW, "--raw", "--json").stdout
    assert text_types.Completion.model_validate_json(raw).object == "text_completion"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty: give a question"),
        ([], "the prompt is empty: give a question"),
        (["Hi", "--stream"], "--stream is for --json"),
        (["Hi", "--json", "--markdown"], "leave out --json"),
        (["Hi", "--temperature", "-1"], "temperature must be"),
        (["Hi", "--raw", "--top-p", "2"], "top_p must be"),
        (["Hi", "--max-tokens", "0"], "max_tokens must be"),
        (["Hi", "--kv-memory", "lots"], "kv_memory must be a size such as 512MB"),
        (["Hi", "--threads", "0"], "threads must be at least 1"),
        (["Hi", "--device", "cuda"], "an NVIDIA card is vulkan or webgpu here"),
        (["Hi", "--schema", "SCHEMA"], "the JSON schema cannot"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], message: str, tmp_path: Path) -> None:
    """The error comes before a model is looked for, so before it is downloaded, built or loaded."""
    (tmp_path / "SCHEMA").write_text('{"type": "array", "uniqueItems": true}')
    words = [str(tmp_path / word) if word == "SCHEMA" else word for word in arguments]
    done = commands.nearfar("run", "no-model-is-needed", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("chat", ["--temperature", "-1"], "temperature must be"),
        ("chat", ["--kv-memory", "lots"], "kv_memory must be a size such as 512MB"),
        ("serve", ["--kv-memory", "lots"], "kv_memory must be a size such as 512MB"),
        ("serve", ["--threads", "0"], "threads must be at least 1"),
    ],
)
def test_what_no_model_can_be_loaded_with(command: str, arguments: list[str], message: str) -> None:
    done = commands.nearfar(command, "no-model-is-needed", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in " ".join(done.stderr.split())


def test_a_terminal_without_a_prompt_says_what_to_do(tmp_path: Path) -> None:
    with Terminal("run", "no-model-is-needed", home=tmp_path, NO_COLOR="1") as terminal:
        assert terminal.end() == 1
        assert "there is no prompt: give one" in terminal.text
        assert "nearfar chat MODEL" in " ".join(terminal.text.split())
        assert not COLOURS.search(terminal.raw)


def test_ctrl_c_is_130(model: Path, tmp_path: Path) -> None:
    with Terminal("run", model, "--raw", "Once", "--temperature", "0", home=tmp_path) as terminal:
        terminal.until(lambda text: len(text.split()) > 10)
        terminal.send("\x03")
        assert terminal.end() == 128 + signal.SIGINT
        assert terminal.text.endswith("stopped")


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_reader_may_have_seen_enough(command: str, model: Path) -> None:
    words = [sys.executable, "-m", "nearfar", command, str(model), "--temperature", "0"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello\n")
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


def test_top_needs_a_terminal() -> None:
    done = nearfar("top", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert b"--once prints one view" in done.stderr


def test_top_says_how_it_ends_and_q_ends_it(tmp_path: Path) -> None:
    async def engine() -> EchoEngine:
        return EchoEngine()

    server = RunningServer(engine)
    with Terminal("top", server.address, "--every", "60", home=tmp_path) as terminal:
        terminal.until("q or Ctrl-C ends")
        terminal.send("x")  # another key asks the server again
        terminal.send("q")
        assert terminal.end() == 0
    once = commands.nearfar("top", server.address, "--once")
    assert (once.returncode, "ends" in once.stdout) == (0, False)
    server.close()


def test_a_shell_completes(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "bin"
    folder.mkdir()
    called = folder / "nearfar"
    called.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nearfar "$@"\n')
    called.chmod(0o755)
    script = nearfar("completion", "bash").stdout.decode()
    (tmp_path / "rc").write_text(f"PS1='$ '\n{script}")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    arguments = ("--noprofile", "--rcfile", tmp_path / "rc", "-i")
    with Terminal(*arguments, home=home, program=shutil.which("bash") or "bash", PATH=path) as shell:
        shell.until("$")
        shell.send("nearfar insp\t")
        shell.until("nearfar inspect")
        shell.send("\x15nearfar run smollm2:13\t")
        shell.until("nearfar run smollm2:135m")
        shell.send("Hi --json-o\t")
        shell.until("--json-object")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_what_other_shells_are_told(shell: str, tmp_path: Path) -> None:
    script = nearfar("completion", shell).stdout.decode()
    assert f"_NEARFAR_COMPLETE=complete_{shell}" in script
    line = {"_TYPER_COMPLETE_ARGS": "nearfar run qwen3:", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    told = nearfar(NEARFAR_HOME=str(tmp_path), _NEARFAR_COMPLETE=f"complete_{shell}", **line)
    assert told.returncode == 0
    assert told.stdout.count(b"0.6b") == 1
    assert b"smollm2" not in told.stdout
