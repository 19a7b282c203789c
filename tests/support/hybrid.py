"""A hybrid client over real parts: an edge engine here, the fallback server behind a proxy that fails as
networks do.

Both sides run the same tiny model, so a greedy answer must be the same text wherever its parts come from.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable
from typing import Any

from nearfar.edge_runtime import AsyncEngine
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.errors import DeviceError
from nearfar.routing import AsyncHybridClient, Endpoint, Policy
from nearfar.routing.policy import MonitorOptions, RetryOptions, Timeouts
from nearfar.routing.shapes import Provenance
from tests.support import tiny
from tests.support.proxy import Proxy
from tests.support.servers import tiny_core

# Each byte is one token, and text has only letters and blanks: text that is cut anywhere has the same tokens
# again.
_ALPHABET = tiny.tokenizer().get_vocab()
LETTERS = {token for char, token in _ALPHABET.items() if char in "abcdefghijklmnopqrstuvwxyzĠ"}
ASK: dict[str, Any] = {
    "max_tokens": 48,
    "temperature": 0,
    "repetition_penalty": 1.3,
    "logit_bias": {str(token): -100 for token in range(261) if token not in LETTERS},
}
HELLO: list[Any] = [{"role": "user", "content": "Tell me about the fox"}]
LOW = MonitorOptions(window=4, min_tokens=6, logprob=-0.001)
QUICK = Policy(retry=RetryOptions(base=0.01), timeouts=Timeouts(connect=2, first_token=10, between=10))
HARD: Callable[[str], float] = lambda prompt: 0.9 if "prove" in prompt else 0.1  # noqa: E731
CHUNK = 'data: {"choices":[{"index":0,"delta":{"content":%s},"finish_reason":%s}]}\n\n'


def edge() -> AsyncEngine:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}
    return AsyncEngine(tiny_core(), TextCodec(tiny.tokenizer(), config, tiny.TEMPLATE, 256))


def lose_after(engine: AsyncEngine, steps: int) -> None:
    """Lose the device in the step that is `steps` from now; it works again afterwards."""
    executor: Any = engine.core.executor
    run, left = executor.run, steps

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            executor.run = run
            raise DeviceError("out of memory")
        return run(*args, **kwargs)

    executor.run = failing


class Rig:
    """Makes clients over the device and the proxied server."""

    def __init__(self, device: AsyncEngine, proxy: Proxy) -> None:
        self.device, self.proxy = device, proxy
        self.made: list[AsyncHybridClient] = []

    def client(self, policy: Policy = QUICK, **options: Any) -> AsyncHybridClient:
        cloud = Endpoint(self.proxy.address, model="tiny", price_in=1.0, price_out=3.0)
        options = {"device": self.device, "cloud": cloud, "difficulty": HARD, **options}
        self.made.append(AsyncHybridClient(policy=policy, **options))
        return self.made[-1]

    async def expected(self) -> str:
        """The answer where nothing fails."""
        answer = await self.device.chat.completions.create(HELLO, **ASK)
        return answer.choices[0].message.content


async def streamed(
    client: AsyncHybridClient, messages: list[Any] = HELLO, **more: Any
) -> tuple[str, list[Provenance]]:
    """The text of a stream, and the provenance that its chunks give."""
    text, told = "", []
    async for chunk in await client.chat.completions.create(messages, stream=True, **{**ASK, **more}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
        if chunk.x_nearfar is not None:
            told.append(chunk.x_nearfar)
    return text, told


def codes(told: Provenance) -> list[str]:
    return [reason.code for reason in told.reasons]


class Odd:
    """A server that answers every request with the same bytes; with `silent` it closes the connection only
    when the server is closed.
    """

    def __init__(self, status: str, body: str, silent: bool = False) -> None:
        answer = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}".encode()  # noqa: E501
        self.requests: list[bytes] = []
        self._over = threading.Event()

        class Handler(socketserver.StreamRequestHandler):
            def handle(handler) -> None:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += handler.rfile.readline()
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                self.requests.append(head + handler.rfile.read(length))
                handler.wfile.write(answer)
                handler.wfile.flush()
                if silent:
                    self._over.wait(60)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Odd:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
