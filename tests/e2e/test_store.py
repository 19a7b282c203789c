"""From a model's name to an answer: a model that is not built yet is built into the store, once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.shared_data import shared_data
from tests.support import commands, gguf_files, quantized_formats
from tests.support.hub import Hub, hub
from tests.support.turns import share

BEGINNING = "Once upon a time, there was a"
GREEDY = ("--raw", "--temperature", "0", "--max-tokens", "40", "--device", "mlx")


def start(home: Path, *args: object, **environment: str) -> subprocess.Popen[str]:
    """Start a command with a store of its own, for mlx, which compiles nothing."""
    command = [sys.executable, "-m", "nearfar", *map(str, args)]
    settings = {**os.environ, "NEARFAR_HOME": str(home / "home"), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=settings)


def nearfar(home: Path, *args: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command: run in this process, unless there are settings that are read
    at import.
    """
    if not environment:
        here = commands.nearfar(*args, NEARFAR_HOME=str(home / "home"))
        return here.returncode, here.stdout, " ".join(here.stderr.split())
    done = start(home, *args, **environment)
    out, err = done.communicate(timeout=300)
    return done.returncode, out, " ".join(err.split())


def client(server: Hub, home: Path) -> dict[str, str]:
    """Settings that direct the hub's own client to a server."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home / "hub"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


class Servers:
    """Runs `nearfar serve` several times, one after the other, in a process that is started once."""

    CODE = (
        "import json, sys\n"
        "from nearfar.cli import app\n"
        "for line in sys.stdin:\n"
        "    sys.argv = ['nearfar', 'serve', *json.loads(line), '--port', '0']\n"
        "    try:\n"
        "        app()\n"
        "    except SystemExit as end:\n"
        "        print('ended with', end.code, flush=True)\n"
    )

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE], stdin=pipe, stdout=pipe, text=True
        )

    @contextmanager
    def serving(self, *arguments: object) -> Iterator[str]:
        """Run a server with these arguments and give its address; afterwards it is told to end, and must end
        well.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(word) for word in arguments]) + "\n")
        process.stdin.flush()
        welcome = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"at (https?://\S+)", welcome)
        assert found, welcome
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended with 0\n"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def until(there: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


def listed(home: Path) -> list[dict[str, Any]]:
    code, out, err = nearfar(home, "list", "--json")
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "stories"
    shutil.copytree(shared_data("models", "stories260K"), folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A store with one model, which two commands requested at the same time."""
    root = tmp_path_factory.mktemp("store")
    both = [start(root, "run", model, *GREEDY, "") for _ in range(2)]
    done = [one.communicate(timeout=300) for one in both]
    assert [one.returncode for one in both] == [0, 0], done
    assert len({out for out, _ in done}) == 1
    assert done[0][0].startswith(BEGINNING)
    return root


def test_a_checkpoint_is_built_once_and_then_known_by_its_name(home: Path, model: Path) -> None:
    (entry,) = listed(home)
    assert (entry["name"], entry["targets"], entry["source"]) == ("stories", ["mlx"], str(model))
    code, out, err = nearfar(home, "run", "stories", *GREEDY, "")
    assert code == 0
    assert "Building" not in err
    assert out.startswith(BEGINNING)
    assert listed(home)[0]["used"] >= entry["used"]


def test_its_card(home: Path, model: Path) -> None:
    code, out, err = nearfar(home, "show", "stories", "--json")
    assert code == 0, err
    card = json.loads(out)
    assert (card["architecture"], card["context"], card["quantization"]) == ("llama", 512, "q4")
    assert card["sampling"] == {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
    assert card["ends_with"] == ["2 </s>"]
    assert card["template_variables"] == []
    assert len(card["provenance"]["checkpoint_sha256"]) == 64
    code, out, err = nearfar(home, "show", os.path.relpath(model))  # a path as `nearfar run` takes it
    assert code == 0, err
    assert "license" in out
    assert card["provenance"]["checkpoint_sha256"] in out  # a pipe has no width, so the text is not cut
    assert "top_k 40, min_p 0.05 (the checkpoint says nothing)" in out
    code, out, err = nearfar(home, "list")
    (name, target, scheme, *_), source = out.splitlines()[1].split(), out.split()[-1]
    assert (name, target, scheme, source) == ("stories", "mlx", "q4", str(model))
    code, _, err = nearfar(home, "show", "nothing")
    assert code == 1
    assert "the store has no 'nothing'; it has stories" in err
    code, _, err = nearfar(home, "show", str(home))
    assert code == 1
    assert f"no model of the path '{home}': nearfar inspect shows an artifact" in err


def test_what_is_no_name_says_what_would_be_one(home: Path) -> None:
    code, _, err = nearfar(home, "run", "no-such-model", "hello")
    assert code == 1
    assert "no-such-model is not a file or folder here, not in the store, and not a hub id" in err
    assert "smollm2:135m" in err
    for given in (("run", "smolm2:135m", "hi"), ("pull", "SmolLM2:135"), ("serve", "smollm2-135m")):
        code, _, err = nearfar(home, *given)
        assert (code, "did you mean smollm2:135m?" in err) == (1, True), err
    for command in ("show", "rm"):
        code, _, err = nearfar(home, command, "storeis")
        assert (code, "the store has no 'storeis': did you mean stories?" in err) == (1, True), err


def test_a_checkpoint_that_changed_is_built_anew(home: Path, tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(model, folder)
    nearfar(home, "pull", folder, "--target", "mlx")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    code, _, err = nearfar(home, "pull", folder, "--target", "mlx")
    assert code == 0
    assert "Building mine (one time)" in err
    assert json.loads(nearfar(home, "show", "mine", "--json")[1])["sampling"] == {"temperature": 0.5}
    code, _, err = nearfar(home, "pull", folder, "--target", "mlx")
    assert "Building" not in err
    assert nearfar(home, "rm", "mine", "nothing")[0] == 1
    assert {entry["name"] for entry in listed(home)} == {"mine", "stories"}
    code, _, err = nearfar(home, "rm", "mine")
    assert (code, "removed mine" in err) == (0, True)
    assert [entry["name"] for entry in listed(home)] == ["stories"]


def test_of_a_path_too_what_is_there_will_do(home: Path, model: Path) -> None:
    """However the model was built, it is used if no options are given."""
    pull = ("pull", model, "--target", "mlx")
    code, _, err = nearfar(home, *pull, "--quant", "q8")
    assert (code, "Next: nearfar run stories:q8" in err) == (0, True), err
    code, _, err = nearfar(home, *pull)
    assert (code, "Building" in err, "Next: nearfar run stories:q8" in err) == (0, False, True), err
    code, _, err = nearfar(home, "rm", "stories:q8")
    assert code == 0, err
    code, _, err = nearfar(home, *pull)
    assert (code, "Building" in err, err.endswith("Next: nearfar run stories")) == (0, False, True), err


def test_codes_of_a_checkpoint_are_made_anew_if_that_is_asked_for(tmp_path: Path) -> None:
    checkpoint = quantized_formats.FORMATS["awq"]().write(tmp_path / "quantized")
    pull = ("pull", checkpoint, "--target", "mlx")
    code, _, err = nearfar(tmp_path, *pull, "--quant", "q3")
    assert (code, "quantize them again with --requantize q3" in err) == (1, True), err
    code, _, err = nearfar(tmp_path, *pull, "--requantize", "q3")
    assert (code, "Next: nearfar run quantized:q3" in err) == (0, True), err
    (entry,) = listed(tmp_path)
    assert (entry["name"], entry["quantization"]) == ("quantized:q3", "q3")
    code, _, err = nearfar(tmp_path, *pull, "--quant", "q3", "--requantize", "q3")
    assert (code, "leave --quant out" in err) == (1, True), err


def test_one_of_the_hub_by_its_id(tmp_path: Path, model: Path) -> None:
    with hub({"tales/stories": model}) as server:
        client = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        code, _, err = nearfar(
            tmp_path, "pull", "tales/stories", "--target", "mlx", "--quant", "q8", **client
        )
        assert code == 0, err
        assert "Next: nearfar run stories:q8" in err
        asked = len(server.asked)
        code, out, err = nearfar(tmp_path, "run", "stories:q8", *GREEDY, "", **client)
        assert (code, len(server.asked)) == (0, asked), err  # a model in the store is run without the network
        assert out.startswith(BEGINNING)
        pull = ("pull", "tales/stories", "--target", "mlx", "--quality")
        code, _, err = nearfar(tmp_path, *pull, "good", **client)
        assert (code, "Next: nearfar run stories:good" in err) == (0, True), err
        (folder,) = (Path(entry["path"]) for entry in listed(tmp_path) if entry["name"] == "stories:good")
        made = json.loads((folder / "mlx" / "manifest.json").read_text())
        assert "moments of the inputs; 8,192 tokens" in made["quantization"]["method"]
        code, _, err = nearfar(tmp_path, *pull, "splendid", **client)
        assert (code, "'splendid' is not one of 'fast'" in err) == (2, True), err


def test_the_server_takes_what_run_takes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of name leads to an answer; models that must be built are built into the store."""
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path / "home"))
    assert nearfar(tmp_path, "pull", model, "--target", "mlx")[0] == 0
    artifact = Path(listed(tmp_path)[0]["path"])
    quantized = quantized_formats.FORMATS["mlc"]().write(tmp_path / "mlc")
    files = tmp_path / "files"
    files.mkdir()
    gguf_files.write(
        model,
        files / "stories-Q8_0.gguf",
        vocabulary=lambda writer: gguf_files.sentencepiece(
            writer, json.loads((model / "tokenizer.json").read_text())
        ),
    )
    known = "HuggingFaceTB/SmolLM2-135M-Instruct"
    repositories = {known: model, "tales/stories": model, "tales/files": files, "some/host": artifact}
    with hub(repositories) as host, ExitStack() as stack:
        for name, value in client(host, tmp_path).items():
            monkeypatch.setenv(name, value)
        servers = Servers()
        stack.callback(servers.end)
        url = f"{host.url}/some/host/resolve/main"
        names = (
            ("stories", (), "stories", None),
            ("smollm2:135m", (), "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2:135m"),
            ("tales/stories", ("--engine", "torch"), None, None),
            ("tales/stories", (), "tales/stories", None),
            ("tales/files:Q8_0", (), "stories-Q8_0", "files:Q8_0"),
            (files / "stories-Q8_0.gguf", (), "stories-Q8_0", "stories-Q8_0.gguf"),
            (quantized, (), "mlc", "mlc"),
            (model, (), "stories", None),
            (f"{url}/mlx/manifest.json", (), "stories", None),
        )
        kept = {"stories"}
        for given, more, called, stored in share(names, 2):  # a server takes two CPU seconds
            with servers.serving(given, *(more or ("--device", "mlx"))) as address:
                (one,) = httpx.get(f"{address}/v1/models", timeout=20).json()["data"]
                assert called in (None, one["id"]), given
                body = {"model": one["id"], "prompt": [1], "max_tokens": 2}
                done = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
                assert done.status_code == 200, (given, done.text)
            kept |= {stored} - {None}
    found = {entry["name"]: entry["source"] for entry in listed(tmp_path)}
    assert kept <= found.keys()
    assert found.get("smollm2:135m", known) == known


@pytest.mark.parametrize("command", ["run", "serve", "show"])
def test_its_name_is_completed(home: Path, command: str) -> None:
    typed = {"_TYPER_COMPLETE_ARGS": f"nearfar {command} stor", "_NEARFAR_COMPLETE": "complete_zsh"}
    code, out, err = nearfar(home, **typed)
    assert code == 0, err
    assert "stories" in out


def test_a_snapshot_is_made_of_a_name(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time, there was a little girl. " * 8)
    given = ("stories", "-o", tmp_path / "x.snap", "--raw", "--file", tmp_path / "text", "--device", "mlx")
    code, _, err = nearfar(home, "cache", "save", *given)
    assert code == 0, err
    assert (tmp_path / "x.snap").is_file()


def test_what_is_kept_is_looked_at_by_its_name(home: Path, model: Path) -> None:
    for given in ("stories", "STORIES", model):
        code, out, err = nearfar(home, "inspect", given, "--json")
        assert (code, json.loads(out or "{}").get("target")) == (0, "mlx"), err
    code, _, err = nearfar(home, "bench", "kernels", "stories")
    assert (code, "no launches" in err or "does not" in err) == (1, True), err
    for command in (
        ("inspect",),
        ("bench", "kernels"),
        ("cache", "save", "-o", home / "x", "--system", "Hi"),
    ):
        code, _, err = nearfar(home, *command, "storeis")
        assert (code, "the store has no 'storeis': did you mean stories?" in err) == (1, True), err
        code, _, err = nearfar(home, *command, f"{model}s")
        assert (code, f"{model}s is not there: did you mean {model}?" in err) == (1, True), err


def test_artifacts_are_copied_out(home: Path, tmp_path: Path) -> None:
    code, _, err = nearfar(home, "cp", "stories", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out" / "mlx" / "manifest.json").is_file()
    assert nearfar(home, "run", tmp_path / "out", *GREEDY, "")[0] == 0


def test_artifacts_at_a_url_are_fetched_once(home: Path, tmp_path: Path) -> None:
    folder = Path(listed(home)[0]["path"])
    with hub({"some/host": folder}) as host:
        url = f"{host.url}/some/host/resolve/stories"
        both = [start(tmp_path, "run", url, *GREEDY, "") for _ in range(2)]
        done = [one.communicate(timeout=300) for one in both]
        assert [one.returncode for one in both] == [0, 0], done
        assert all(out.startswith(BEGINNING) for out, _ in done)
        shards = [line for line in host.asked if line.endswith("model.safetensors")]
        assert len(shards) == 1  # two processes share one download
    (entry,) = listed(tmp_path)
    assert (entry["name"], entry["source"], entry["targets"]) == ("stories", f"{url}/", ["mlx"])
    code, out, err = nearfar(tmp_path, "run", "stories", *GREEDY, "")  # the host cannot be reached any more
    assert (code, out.startswith(BEGINNING)) == (0, True), err


def test_ctrl_c_in_a_download_leaves_nothing_half(home: Path, tmp_path: Path) -> None:
    folder = Path(listed(home)[0]["path"])
    with hub({"some/host": folder}) as host:
        url = f"{host.url}/some/host/resolve/stories"
        host.hold["mlx/model.safetensors"] = 1000
        pulling = start(tmp_path, "pull", url, "--target", "mlx")
        assert host.held.wait(60)
        until(lambda: any(file.stat().st_size == 1000 for file in tmp_path.rglob("*") if file.is_file()))
        pulling.send_signal(signal.SIGINT)
        pulling.communicate(timeout=10)
        assert pulling.returncode != 0
        (cut,) = listed(tmp_path)
        assert (cut["name"], cut["finished"], cut["targets"]) == ("stories", False, [])
        assert cut["bytes"] > 1000
        code, _, err = nearfar(tmp_path, "pull", url, "--target", "mlx")
        assert code == 0, err
        assert any(line.endswith("model.safetensors bytes=1000-") for line in host.asked)
    assert [entry["name"] for entry in listed(tmp_path)] == ["stories"]
