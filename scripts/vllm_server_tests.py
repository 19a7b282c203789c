"""Runs vLLM's own tests of its HTTP server against a running server, and counts what passed.

    python scripts/vllm_server_tests.py VLLM_SOURCE --names | xargs nearfar serve ARTIFACT
    python scripts/vllm_server_tests.py VLLM_SOURCE http://127.0.0.1:8000 TOKENIZER

VLLM_SOURCE is the unpacked source distribution of vLLM, which stays as it is: a copy of its `tests` runs with
another `utils.py`, whose server is the one at the URL, and with stand-ins for vLLM's own modules. Tests
that need these modules fail. The server serves its model under all names that the tests use. TOKENIZER is
the folder of the model's tokenizer. Some answers end only with the context: give the server a --kv-memory
that holds 8,192 tokens. The last line has the counts, and `--report FILE` gets a line of JSON for
each test.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

FOLDERS = ("entrypoints", "tool_use")
ASKS = re.compile(r"RemoteOpenAIServer|RemoteVLLMServer|\bserver\b.*:|async_client|client: openai")
"""How the text of a test shows that it asks a server."""
NAME = re.compile(r'(?<=["\'])(?:[A-Za-z][\w-]+/[\w.-]+|claude-[\w-]+|zephyr-lora\d?)(?=["\'])')
"""How the text of a test names a model: as repositories of the hub are named."""

UTILS = '''
"""A server that is there already, under the names of vLLM's tests/utils.py."""
import os
import types

URL = os.environ["TESTED_URL"]


class RemoteOpenAIServer:
    DUMMY_API_KEY = "none"

    def __init__(self, *args, **options):
        self.host, self.port = URL.removeprefix("http://").split(":")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    @property
    def url_root(self):
        return URL

    def url_for(self, *parts):
        return URL + "/" + "/".join(parts)

    def get_client(self, **options):
        import openai
        given = {"timeout": 60, "max_retries": 0, "api_key": "none", **options}
        return openai.OpenAI(base_url=self.url_for("v1"), **given)

    def get_async_client(self, **options):
        import openai
        given = {"timeout": 60, "max_retries": 0, "api_key": "none", **options}
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **given)

    def get_client_anthropic(self, **options):
        import anthropic
        return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, **{"timeout": 60, **options})

    def get_async_client_anthropic(self, **options):
        import anthropic
        given = {"timeout": 60, "max_retries": 0, "api_key": "none", **options}
        return anthropic.AsyncAnthropic(base_url=URL, **given)


RemoteVLLMServer = RemoteOpenAIServerCustom = RemoteLaunchRenderServer = RemoteOpenAIServer
import pathlib

VLLM_PATH = pathlib.Path(__file__).parent.parent
ROCM_ENV_OVERRIDES, ROCM_EXTRA_ARGS = {}, []


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def passed(*args, **options):  # a decorator, with or without arguments
        if len(args) == 1 and isinstance(args[0], types.FunctionType):
            return args[0]
        return lambda function: function

    return passed
'''

CONFTEST = '''
"""Stand-ins for vLLM's modules, and the model of the tests."""
import base64
import importlib.abc
import importlib.machinery
import os
import sys
from unittest.mock import MagicMock

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
sys.modules.setdefault("pybase64", base64)
TOKENIZER = os.environ["TESTED_TOKENIZER"]


class Module(MagicMock):
    __path__ = []
    __all__ = []
    __file__ = "stand-in"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_test_utils"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        made = Module(name=spec.name)
        made.__spec__ = spec
        if spec.name == "vllm.platforms":
            made.current_platform = MagicMock()
            for name in ("is_rocm", "is_xpu", "is_cpu", "is_tpu", "is_cuda", "is_cuda_alike"):
                getattr(made.current_platform, name).return_value = False
        if spec.name == "vllm.tokenizers":
            from transformers import AutoTokenizer
            made.get_tokenizer = lambda *args, **options: AutoTokenizer.from_pretrained(TOKENIZER)
        return made

    def exec_module(self, module):
        return None


sys.meta_path.insert(0, Finder())

import transformers

_asked = transformers.AutoTokenizer.from_pretrained
transformers.AutoTokenizer.from_pretrained = lambda *args, **options: _asked(TOKENIZER)


def pytest_runtest_logreport(report):
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        import json
        why = "" if report.outcome == "passed" else str(report.longrepr)[-4000:]
        with open(os.environ["TESTED_REPORT"], "a") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "why": why}) + "\\n")
'''


def asking(tests: Path) -> list[str]:
    """The test files that ask a server, as paths below `tests`."""
    files = (path for folder in FOLDERS for path in sorted((tests / folder).rglob("test_*.py")))
    found = [path for path in files if ASKS.search(path.read_text(encoding="utf-8"))]
    return [str(path.relative_to(tests.parent)) for path in found]


def names(source: Path) -> list[str]:
    """The names of models that the tests use."""
    found = set[str]()
    for path in [*asking(source / "tests"), "tests/tool_use/utils.py"]:
        found |= set(NAME.findall((source / path).read_text(encoding="utf-8")))
    return sorted(found)


def run(source: Path, url: str, tokenizer: Path, report: Path, only: list[str]) -> Counter[str]:
    """Run the tests, and return how many had which outcome."""
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(source / "tests", tests)
        (tests / "utils.py").write_text(UTILS, encoding="utf-8")
        (tests / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        found = {
            "TESTED_URL": url, "TESTED_TOKENIZER": str(tokenizer),
            "TESTED_REPORT": str(report), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o"]
        command += ["asyncio_mode=auto", "--continue-on-collection-errors", "--rootdir", folder]
        subprocess.run(
            command + (only or asking(tests)), cwd=folder, env={**os.environ, **found}, check=False
        )
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return Counter(json.loads(line)["outcome"] for line in lines)


def main() -> None:
    """Read the command line, run, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("url", nargs="?")
    parser.add_argument("tokenizer", type=Path, nargs="?")
    parser.add_argument("--names", action="store_true", help="print the server's options --name, and end")
    parser.add_argument("--report", type=Path, default=Path("out/vllm-server-tests.jsonl"))
    parser.add_argument("--only", nargs="*", default=[], help="test files below VLLM_SOURCE, such as tests/…")
    given = parser.parse_args()
    if given.names or given.url is None or given.tokenizer is None:
        print(*(f"--name={name}" for name in names(given.source)))
        return
    report = given.report.resolve()
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    counts = run(given.source, given.url, given.tokenizer.resolve(), report, given.only)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
