"""Records between the server's process and the engine's. They travel as framed pickles.

The socket is private to the two processes (a socketpair), so pickle reads only what this package wrote. User
input is inside these records as numbers and strings.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.fallback_server import framing
from nearfar.fallback_server.backend import BackendEvent, BackendInfo, EmbedRequest, TokenRequest
from nearfar.fallback_server.torch_engine.options import TorchOptions

# seconds between signs of life; a working worker is never silent for longer, except during one layer's work
BEAT = 0.25


@dataclass(frozen=True)
class Start:
    """The first record to the worker: the model to load, and how."""

    path: Path
    options: TorchOptions


@dataclass(frozen=True)
class Learn:
    """A compiled grammar for the later requests that name its key."""

    key: str
    compiled: str


@dataclass(frozen=True)
class Forget:
    """Tells the worker to drop a grammar: no later request names it."""

    key: str


@dataclass(frozen=True)
class Submit:
    """A checked request; its sampling has a seed. `grammar`: the key of a grammar that was sent before."""

    request: TokenRequest
    grammar: str | None = None


@dataclass(frozen=True)
class Cancel:
    """Ends a request, for tokens or a vector, whose results are no longer wanted."""

    id: str


@dataclass(frozen=True)
class EmbedSequence:
    """A checked sequence to embed."""

    request: EmbedRequest


@dataclass(frozen=True)
class Shutdown:
    """Tells the worker to end."""


@dataclass(frozen=True)
class Ready:
    """Tells that the model is loaded."""

    info: BackendInfo


@dataclass(frozen=True)
class Unfit:
    """Reports that the model or the device cannot be used. `kind` names the class in errors.py. Starting
    again would not help.
    """

    kind: Literal["CheckpointError", "DeviceError"]
    message: str


@dataclass(frozen=True)
class Counters:
    """Counts since the worker's start, and current values (`running`, `waiting`, `cache_usage`, `memory` in
    bytes).
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    memory: int = 0


@dataclass(frozen=True)
class Started:
    """Tells which requests take part in steps from now on."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """The events of one step. An event that ends with "abort" has no token: the logits of its request are not
    finite.
    """

    events: tuple[tuple[str, BackendEvent], ...]
    counters: Counters


@dataclass(frozen=True)
class RefusedRequest:
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
    """A heartbeat: tells that the engine still runs when no other message was sent for a while."""

    counters: Counters


ToWorker = Start | Learn | Forget | Submit | Cancel | EmbedSequence | Shutdown
FromWorker = Ready | Unfit | Started | Stepped | RefusedRequest | Embedded | Beat


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return a record as framed bytes."""
    return framing.framed(pickle.dumps(message, protocol=5))


def receive(source: framing.ByteSource) -> ToWorker | None:
    """Wait for the next record; None when the other side is gone."""
    body = framing.receive(source)
    message: ToWorker | None = None if body is None else pickle.loads(body)
    return message


async def read(reader: asyncio.StreamReader) -> FromWorker | None:
    """Read the next record on an event loop; None when the worker is gone."""
    body = await framing.read(reader)
    message: FromWorker | None = None if body is None else pickle.loads(body)
    return message
