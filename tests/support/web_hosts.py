"""Runs the package's engine in Node by the scripts of web/test/hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import WEB, node


def asked_in_node(host: str, artifact: Path, given: Any, times: int) -> dict[str, Any]:
    """Run web/test/hosts/HOST.mjs with a wasm artifact, a value that it reads as JSON, and a number of
    answers; gives what it prints. Skips the test where the package is not built.
    """
    if not (WEB / "dist" / "node" / "index.js").is_file():
        pytest.skip("the web package is not built (run `make setup`)")
    command = [node(), str(WEB / f"test/hosts/{host}.mjs"), str(WEB / "dist"), str(artifact)]
    made = subprocess.run(
        [*command, json.dumps(given), str(times)], capture_output=True, text=True, timeout=200, check=False
    )
    assert made.returncode == 0, made.stderr
    told: dict[str, Any] = json.loads(made.stdout)
    return told
