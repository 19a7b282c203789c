"""The browser's tokenizers and chat templates, in one Node process for all tests."""

from __future__ import annotations

import atexit
import json
import subprocess
from functools import cache
from typing import Any

from tests.support.paths import WEB, node


def ask(job: dict[str, Any]) -> Any:
    """The answer to one job; web/test/parity/codec_server.mjs defines the jobs."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, "the codec server has ended; its errors are above"
    return json.loads(line)


@cache
def _server() -> subprocess.Popen[str]:
    """Start Node with the codec, once: bundling and starting cost more than all jobs of a test."""
    script = WEB / "test" / "parity" / "codec_server.mjs"
    pipe = subprocess.PIPE
    server = subprocess.Popen([node(), str(script)], stdin=pipe, stdout=pipe, encoding="utf-8")
    atexit.register(server.kill)
    return server
