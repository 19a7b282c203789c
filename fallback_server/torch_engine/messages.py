"""Records between the server's process and the engine's, and how they travel: as pickles, framed.

The socket is private to the two processes (a socketpair), so pickle reads only what this package wrote. What
users send arrives inside these records as numbers and strings.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.fallback_server import framing
from nearfar.fallback_server.backend import BackendInfo, EmbedRequest, TokenEvent, TokenRequest
from nearfar.fallback_server.torch_engine.options import TorchOptions

BEAT = 0.25  # seconds; a worker that goes on is never silent for longer (but for one layer's work)


@dataclass(frozen=True)
class Start:
    """First record to the worker: what to load."""

    path: Path
    options: TorchOptions


@dataclass(frozen=True)
class Learn:
    """A grammar as GrammarService compiled it, for the requests after it that name its key."""

    key: str
    compiled: str


@dataclass(frozen=True)
class Forget:
    """No request after this one names the grammar."""

    key: str


@dataclass(frozen=True)
class Submit:
    """A checked request; its sampling has a seed. `grammar`: the key of one that was sent before."""

    request: TokenRequest
    grammar: str | None = None


@dataclass(frozen=True)
class Cancel:
    """The request, for tokens or a vector, may end at once; nothing of it is wanted."""

    id: str


@dataclass(frozen=True)
class Embed:
    """A checked sequence to embed."""

    request: EmbedRequest


@dataclass(frozen=True)
class Shutdown:
    """End now."""


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    info: BackendInfo


@dataclass(frozen=True)
class Unfit:
    """The model or the device cannot be used; `kind` names the class in errors.py. Starting again would
    not help.
    """

    kind: Literal["CheckpointError", "DeviceError"]
    message: str


@dataclass(frozen=True)
class Counters:
    """Counts since the worker's start, and what is so now."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Started:
    """These requests take part in steps from now on."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """The events of one step. One that ends with "abort" has no token, because the logits of its request
    are not finite.
    """

    events: tuple[tuple[str, TokenEvent], ...]
    counters: Counters


@dataclass(frozen=True)
class Refused:
    """A request that turned out to be impossible (RequestError)."""

    id: str
    message: str
    param: str | None


@dataclass(frozen=True)
class Embedded:
    """The vector of a sequence."""

    id: str
    values: Vector


@dataclass(frozen=True)
class Beat:
    """The engine goes on; sent when nothing else has been for a while."""

    counters: Counters


ToWorker = Start | Learn | Forget | Submit | Cancel | Embed | Shutdown
FromWorker = Ready | Unfit | Started | Stepped | Refused | Embedded | Beat


def encode(message: ToWorker | FromWorker) -> bytes:
    """A record as it travels."""
    return framing.framed(pickle.dumps(message, protocol=5))


def receive(source: framing.Source) -> ToWorker | None:
    """Wait for the next record; None when the other side is gone."""
    body = framing.receive(source)
    message: ToWorker | None = None if body is None else pickle.loads(body)
    return message


async def read(reader: asyncio.StreamReader) -> FromWorker | None:
    """Read one message on an event loop; None where the worker is gone."""
    body = await framing.read(reader)
    message: FromWorker | None = None if body is None else pickle.loads(body)
    return message
