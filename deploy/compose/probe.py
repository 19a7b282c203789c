"""Health check with a real token: exits 0 when an OpenAI-compatible server generates one. Needs Python only.

probe.py URL [FILE_WITH_KEY]
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

SECONDS = 10


def ask(url: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer of a GET, or of a POST if there is a body."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS) as answer:
        return json.load(answer)


def main() -> int:
    """The exit status."""
    url = sys.argv[1].rstrip("/")
    key = Path(sys.argv[2]).read_text(encoding="utf-8").strip() if len(sys.argv) > 2 else None
    try:
        model = ask(f"{url}/v1/models", key)["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        if not ask(f"{url}/v1/completions", key, body)["usage"]["completion_tokens"]:
            raise ValueError("the answer has no token")
    except (OSError, ValueError, LookupError) as error:
        print(f"{url} generates nothing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
