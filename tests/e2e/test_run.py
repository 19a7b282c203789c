"""`nearfar run` and `nearfar chat` as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.kernels.buckets import Buckets
from tests.shared_data import shared_data
from tests.support import commands
from tests.support.artifacts import Built


@pytest.fixture(scope="module")
def stories(built: Built) -> Path:
    return built("stories260K", "none")


@pytest.fixture(scope="module")
def classics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("classics")
    options = BuildOptions(
        str(shared_data("models", "classics-1M")), out, ("cpu",), "none", cpu_features=("native",),
        buckets=Buckets((1, 16), (1,)),
    )  # fmt: skip
    build(options)
    return out


def nearfar(*args: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nearfar", *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, timeout=300, input=stdin, check=False)


def test_the_golden_text_comes_out_byte_for_byte(stories: Path) -> None:
    done = nearfar("run", stories, "", "--raw", "--max-tokens", 199, "--temperature", 0, "--stats")
    assert done.stdout == shared_data("models", "stories260K", "golden_greedy.txt").read_bytes()
    assert b"decode" in done.stderr
    assert done.returncode == 0


def test_the_prompt_may_come_from_stdin(stories: Path) -> None:
    given = nearfar("run", stories, "Lily was", "--raw", "--max-tokens", 20, "--seed", 3)
    assert given.stdout
    for arguments in (["-"], []):
        piped = nearfar(
            "run", stories, *arguments, "--raw", "--max-tokens", 20, "--seed", 3, stdin=b"Lily was"
        )
        assert piped.stdout == given.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hi"], "no chat template"),
        (["Hi", "--raw", "--temperature=-1"], "temperature must be a number in [0, 100], not -1.0"),
        (["Hi", "--raw", "--top-p", "nan"], "top_p must be"),
        (["a " * 600, "--raw"], "maximum context length is 512 tokens"),
        (["Hi", "--raw", "--kv-memory", "10k"], "for the KV cache is too little"),
        (["Hi", "--raw", "--device", "abacus"], "device must be auto"),
        (["Hi", "--raw", "--threads", "0"], "threads must be at least 1"),
        (["Hi", "--raw", "--system", "x"], "--system needs the chat template"),
    ],
)
def test_bad_requests(stories: Path, arguments: list[str], message: str) -> None:
    done = commands.nearfar("run", stories, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    # on a busy machine, the error may come after a message about waiting
    assert "\nerror: " in "\n" + done.stderr
    assert message in done.stderr


def test_bad_bytes_on_stdin(stories: Path) -> None:
    done = nearfar("run", stories, "-", "--raw", stdin=b"ab\xff")
    assert done.returncode == 1
    assert b"not UTF-8: byte 2 is 0xff" in done.stderr


def test_chat_in_a_pipe(classics: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    script = (
        f"Hello\n\n/stats\n/retry\n/nothing\n/save {saved}\n/system Be brief.\n/system\n/exit\nnot read\n"
    )
    done = nearfar("chat", classics, "--max-tokens", 12, "--temperature", 0, stdin=script.encode())
    assert done.returncode == 1  # one of the commands failed
    lines = done.stdout.decode().splitlines()
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert done.stdout.decode().count(messages[1]["content"]) == 2
    assert b"error: no command /nothing; /help lists them" in done.stderr
    assert lines[-1] == "Be brief."
    assert b"tokens/s" in done.stderr


def test_chat_goes_on_where_the_context_is_full(classics: Path) -> None:
    script = (("the fox and the crow " * 60 + "\n") * 4 + "Hello\n").encode()
    options = ("--max-tokens", 8, "--temperature", 0)
    done = nearfar("chat", classics, *options, "--context-policy", "truncate-oldest", stdin=script)
    assert done.returncode == 0, done.stderr
    assert b"note: the oldest 2 messages do not fit the context" in done.stderr
    assert b"fits the context" not in done.stderr
    refused = nearfar("chat", classics, *options, stdin=script)
    assert b"the conversation no longer fits the context" in refused.stderr
    assert b"/set context_policy truncate-oldest" in refused.stderr
    assert refused.returncode == 1
