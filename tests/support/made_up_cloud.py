"""A scripted cloud for tests of the chat page: a test chooses the answers and sees the requests."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.browser import Page, new_page

CLOUD = "https://cloud.example"

SET_CLOUD = """
([address, key]) => {
  for (const [id, value] of [["mode", "cloud_only"], ["cloud-address", address], ["cloud-key", key]]) {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event("change"));
  }
}
"""


def cloud_page(
    chromium: Any, address: str, context: Any = None, pieces: Sequence[str] = ("Far.",), **options: Any
) -> tuple[Page, list[Any]]:
    """A page with a scripted cloud that answers with `pieces`, and the list of requests that reached the
    cloud.
    """
    # Playwright sees no requests of a page that has a service worker.
    page = new_page(chromium, address, context or chromium.new_context(service_workers="block", **options))
    asked: list[Any] = []
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    events = []
    for at, piece in enumerate(pieces):
        delta = {"role": "assistant", "content": piece}
        reason = "stop" if at == len(pieces) - 1 else None
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        events.append(f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n")
    body = "".join(events) + "data: [DONE]\n\n"
    models = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})
    headers = {
        "access-control-allow-origin": "*",
        "access-control-allow-headers": "*",
        "content-type": "text/event-stream",
    }

    def answer(route: Any) -> None:
        if route.request.method == "POST":
            asked.append(route.request)
        route.fulfill(
            status=200, headers=headers, body=models if route.request.url.endswith("/models") else body
        )

    page.tab.route(f"{CLOUD}/**", answer)
    return page, asked
