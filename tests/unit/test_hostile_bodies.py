"""Bodies with wrong types, as large as the server takes, are rejected quickly and with little memory,
wherever the wrong value is.

The places are read from the schemas of the requests, so a new field is attacked too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import BaseModel

from nearfar.fallback_server.http.apis.decisions import DecisionRequest
from nearfar.fallback_server.http.apis.messages import MessageRequest
from nearfar.fallback_server.http.apis.ollama import ChatBody, GenerateBody
from nearfar.fallback_server.http.apis.responses import ResponseRequest
from nearfar.fallback_server.http.apis.score import ScoreBody
from nearfar.fallback_server.http.apis.tokens_routes import TokenizeRequest
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from tests.support.hostile import MemoryWatch
from tests.support.turns import in_turns, share

SIZE = (4 << 20) - 4096
SECONDS = 10.0
"""Time limit in seconds for one body; most take a quarter of a second."""
MEGABYTES = 300
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
    "/v1/decisions": DecisionRequest,
    "/v1/score": ScoreBody,
    "/v1/tokenize": TokenizeRequest,
    "/api/chat": ChatBody,
    "/api/generate": GenerateBody,
}
Wrap = Callable[[Any], Any]


def places(path: str) -> Iterator[tuple[str, Wrap]]:
    """Every object and list of a request: its name, and a function that puts a value there in the smallest
    request.
    """
    root = MODELS[path].model_json_schema()
    yield from _walk(root, root, "", lambda value: value, frozenset())


def _walk(root: Any, schema: Any, name: str, wrap: Wrap, seen: frozenset[str]) -> Iterator[tuple[str, Wrap]]:
    if "$ref" in schema:
        target = schema["$ref"].rsplit("/", 1)[1]
        if target not in seen:
            yield from _walk(root, root["$defs"][target], name, wrap, seen | {target})
        return
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _walk(root, branch, name, wrap, seen)
    if schema.get("type") == "array":
        yield f"{name}[]", wrap
        yield from _walk(root, schema.get("items", {}), f"{name}[]", lambda value: wrap([value]), seen)
    if schema.get("type") == "object":
        yield f"{name}{{}}", wrap
        for key, inner in schema.get("properties", {}).items():
            base = {other: least(root, schema["properties"][other]) for other in schema.get("required", ())}
            yield from _walk(
                root, inner, f"{name}.{key}", lambda value, k=key, b=base: wrap({**b, k: value}), seen
            )
    if not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const"}:  # the schema allows any value
        yield f"{name}[]", wrap
        yield f"{name}{{}}", wrap


def least(root: Any, schema: Any) -> Any:
    """A small value of a schema."""
    if "$ref" in schema:
        return least(root, root["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return least(root, schema[union][0])
    match schema.get("type"):
        case "array":
            return [least(root, schema["items"])]
        case "object":
            return {key: least(root, schema["properties"][key]) for key in schema.get("required", ())}
        case "integer" | "number":
            return 1
        case _:
            return "x"


def heap(name: str, wrap: Wrap) -> bytes:
    """A body with many wrong values at a place, as a list or an object."""
    item, ends = ("{}", "[]") if name.endswith("[]") else ('"%d":{}', "{}")
    parts = (item % n for n in range(SIZE // 15)) if "%" in item else (item for _ in range(SIZE // 3))
    return json.dumps(wrap("@")).encode().replace(b'"@"', (ends[0] + ",".join(parts) + ends[1]).encode())


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own, over an engine that is never called."""
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src"), *filter(None, sys.path)]),
    }
    folder = str(tmp_path_factory.mktemp("tiny"))
    command = [sys.executable, "-m", "tests.support.tiny_server", folder, "--strict"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as started:
        assert started.stdout is not None
        yield started.stdout.readline().strip(), psutil.Process(started.pid)
        started.terminate()


def test_the_places_are_found() -> None:
    found = {name for path in MODELS for name, _ in places(path)}
    assert {
        "{}",
        ".messages[]",
        ".messages[].content[]",
        ".tools[].function.parameters{}",
        ".logit_bias{}",
        ".stop[]",
        ".prompt[]",
        ".prompt[][]",
        ".input[]",
        ".stop_token_ids[]",
        ".messages[].tool_calls[]",
        ".response_format.json_schema.schema{}",
        ".chat_template_kwargs{}",
        ".metadata{}",
        ".guided_json[]",
    } <= found


def test_a_heap_of_wrong_types_is_refused_at_once(process: tuple[str, psutil.Process]) -> None:
    refuses_heaps("/v1/chat/completions", *process)


@in_turns("path")  # the same code reads the bodies of all paths, so one path a run is enough
@pytest.mark.parametrize("path", [path for path in MODELS if path != "/v1/chat/completions"])
def test_a_heap_at_another_path_is_refused_at_once(path: str, process: tuple[str, psutil.Process]) -> None:
    refuses_heaps(path, *process)


def refuses_heaps(path: str, address: str, server: psutil.Process) -> None:
    """Send a heap of wrong values at a third of the places of a request."""
    wrong = []
    with httpx.Client(base_url=address, timeout=60) as http:
        for name, wrap in share(list(dict(places(path)).items()), 3):
            with MemoryWatch([server]) as watch:
                start = time.monotonic()
                response = http.post(
                    path, content=heap(name, wrap), headers={"Content-Type": "application/json"}
                )
                seconds = time.monotonic() - start
            if (
                # a field without effect on the answer may have any value
                response.status_code not in (400, 200)
                or seconds > SECONDS
                or watch.megabytes > MEGABYTES
                or len(response.content) > 4096
            ):
                wrong.append(
                    f"{name}: {response.status_code} {seconds:.1f} s {watch.megabytes:.0f} MB "
                    f"{response.text[:200]}"
                )
    assert wrong == []
