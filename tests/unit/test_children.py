"""Processes that the packages start get no keys from the environment of this process."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearfar.children import child_environment, is_key, keys_hidden
from nearfar.fallback_server.sandbox import process
from nearfar.fallback_server.sandbox.process import ChildPool, ChildSpec

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nearfar"
STARTS = {
    "subprocess": {"run", "call", "check_call", "check_output", "Popen"},
    "asyncio": {"create_subprocess_exec"},
}
"""Ways in which the packages may start a process: with an environment that `child_environment` makes."""
FORBIDDEN = {
    "os": {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"},
    "asyncio": {"create_subprocess_shell"},
    "subprocess": {"getoutput", "getstatusoutput"},
    "pty": {"spawn", "fork"},
}
"""Ways to start a process without an environment, or through a shell."""
MODULES = {"multiprocessing", "concurrent.futures.process", "pty"}
SECRETS = {
    "NEARFAR_UPSTREAM_KEY": "k1", "NEARFAR_CLOUD_KEY": "k2", "OPENAI_API_KEY": "k3", "HF_TOKEN": "k4",
    "HUGGING_FACE_HUB_TOKEN": "k5", "AWS_SECRET_ACCESS_KEY": "k6", "AWS_SESSION_TOKEN": "k7",
    "DATABASE_URL": "k8",
    "GITHUB_PAT": "k9", "REDIS_PASSWORD": "ka", "HTTPS_PROXY": "http://me:kb@proxy:3128", "SENTRY_DSN": "kc",
    "NEARFAR_LIMITS": "redis://:kd@store", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=ke", "MYAPIKEY": "kf",
    "HF_ENDPOINT": "https://me:kg@mirror", "WHATEVER_IT_IS_CALLED": "kh", "RAY_AUTH_TOKEN": "ki",
}  # fmt: skip
NEEDED = {
    "PATH": "p", "HOME": "h", "PYTHONPATH": "pp", "LD_LIBRARY_PATH": "l", "CUDA_VISIBLE_DEVICES": "0",
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NEARFAR_HOME": "n",
    "NEARFAR_KERNEL_CACHE": "c",
    "HF_HOME": "hf", "TMPDIR": "t", "LC_ALL": "C", "http_proxy": "http://proxy:3128", "SystemRoot": "w",
    "ZIG_GLOBAL_CACHE_DIR": "z", "CXX": "c++", "XDG_CACHE_HOME": "x", "PATHEXT": ".EXE",
}  # fmt: skip


def sources() -> Iterator[Path]:
    """All Python files of the package, whose parts are links, and of the demo."""
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        yield from (Path(folder) / name for name in names if name.endswith(".py"))
    yield from (ROOT / "examples").glob("*.py")


def faults(source: str) -> list[str]:
    """Starts of processes that do not say which environment the process gets."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in {*STARTS, *FORBIDDEN} - {"asyncio", "os"}:
            found.append(f"{node.lineno}: from {node.module} import …")
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            found += [f"{node.lineno}: {name}" for name in names if name in MODULES]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        home, _, name = called.rpartition(".")
        bare = home == "os" and name.startswith(("exec", "spawn"))
        if bare or name in FORBIDDEN.get(home, ()) or name == "ProcessPoolExecutor":
            found.append(f"{node.lineno}: {called}")
        if name in STARTS.get(home, ()) or name == "subprocess_exec":
            given = [ast.unparse(each.value) for each in node.keywords if each.arg == "env"]
            if not any(each.startswith("child_environment(") for each in given):
                found.append(f"{node.lineno}: {called} without env=child_environment(…)")
    return found


def test_every_start_of_a_process_says_what_it_knows() -> None:
    found = {str(path.relative_to(ROOT)): faults(path.read_text(encoding="utf-8")) for path in sources()}
    assert {path: each for path, each in found.items() if each} == {}
    assert len(found) > 300


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(['x'])",
        "subprocess.Popen(['x'], env={**os.environ})",
        "os.system('x')",
        "os.execv(a, b)",
        "asyncio.create_subprocess_exec('x')",
        "asyncio.create_subprocess_shell('x')",
        "import multiprocessing",
        "from subprocess import run",
        "from concurrent.futures.process import ProcessPoolExecutor as P",
        "ProcessPoolExecutor()",
        "from multiprocessing import Process",
    ],
)
def test_the_bound_holds(source: str) -> None:
    assert faults(source)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **NEEDED}.items():
        monkeypatch.setenv(name, value)


def test_a_child_knows_what_it_needs_and_no_key(secrets: None) -> None:
    made = child_environment(PYTHONPATH="other", MORE="m")
    assert not set(SECRETS) & set(made)
    assert {name: made[name] for name in NEEDED} == {**NEEDED, "PYTHONPATH": "other"}
    assert made["MORE"] == "m"


def test_keys_are_hidden_and_come_back(secrets: None) -> None:
    with keys_hidden():
        left = {name for name in SECRETS if name in os.environ}
        assert left == {"DATABASE_URL", "WHATEVER_IT_IS_CALLED", "RAY_AUTH_TOKEN"}, (
            "known by no sign, or Ray's"
        )
        assert {name: os.environ[name] for name in NEEDED} == NEEDED
    assert {name: os.environ[name] for name in SECRETS} == SECRETS
    assert not is_key("PYTHONPATH", "/a:/b")


async def test_the_child_that_renders_templates_has_no_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The environment is read from the operating system."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("the system does not tell")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def kept(*arguments: object, **options: object) -> asyncio.subprocess.Process:
        code = (
            "import json, time; data = json.dumps({}).encode(); import sys;"
            "sys.stdout.buffer.write(len(data).to_bytes(4, 'little') + data); sys.stdout.flush();"
            "time.sleep(60)"
        )
        started.append(await start(sys.executable, "-c", code, **options))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(process.asyncio, "create_subprocess_exec", kept)
    pool = ChildPool(ChildSpec("x", {}, "template"))
    await pool.warm()
    told = Path(f"/proc/{started[0].pid}/environ").read_bytes().split(b"\0")
    await pool.close()
    names = {each.partition(b"=")[0].decode() for each in told}
    assert "PATH" in names
    assert not names & set(SECRETS)
