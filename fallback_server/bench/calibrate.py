"""Inspects the server before the load: its model, its context length, the fields that it accepts, and how
many of its tokens each word costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nearfar.errors import NearfarError
from nearfar.fallback_server.bench.client import Client
from nearfar.fallback_server.bench.prompts import OPENING, WORDS, Words
from nearfar.remote.chunks import ShapeError, read_usage
from nearfar.remote.errors import RefusedError, RemoteError

REPEATS = 4
AT_ONCE = 4
BUSY_WAITS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds to wait between attempts when the server answers 429: others may use it, or it takes few requests
at once.
"""


@dataclass(frozen=True)
class Calibrated:
    """The facts that are known of the server. `notes`: remarks for whoever reads the figures."""

    url: str
    model: str
    context: int | None
    ignore_eos: bool
    words: Words
    notes: tuple[str, ...] = ()


async def look(client: Client, words: Sequence[str] = WORDS) -> Calibrated:
    """Query the server; sets the client's `model` and `ignore_eos`."""
    notes = []
    listed = await client.models()
    if not client.model and not listed:
        raise NearfarError(f"{client.url} lists no model: name one with --model")
    client.model = client.model or listed[0].id
    context = next((model.context for model in listed if model.id == client.model), None)
    if context is None:
        notes.append(
            "The server does not report its context length, so lengths are not limited to it (see "
            "--max-prompt)."
        )
    if client.ignore_eos and not await _takes(client):
        client.ignore_eos = False
        if await _takes(client):
            notes.append("The server rejects ignore_eos, so answers may be shorter than requested.")
    measured = await _measure(client, words)
    if not measured.exact:
        notes.append(
            "The server reports no usage, so each word of a prompt and each piece of an answer counts as one "
            "token."
        )
    return Calibrated(client.url, client.model, context, client.ignore_eos, measured, tuple(notes))


async def _measure(client: Client, words: Sequence[str]) -> Words:
    overhead = await _prompt_tokens(client, OPENING)
    if overhead is None:
        return Words(dict.fromkeys(words, 1), 1, False)
    gate = asyncio.Semaphore(AT_ONCE)

    async def cost(word: str) -> float:
        async with gate:
            tokens = await _prompt_tokens(client, " ".join([OPENING, *[word] * REPEATS]))
            return ((tokens or 0) - overhead) / REPEATS

    costs = dict(zip(words, await asyncio.gather(*map(cost, words)), strict=True))
    whole = {word: int(cost) for word, cost in costs.items() if cost >= 1 and cost == int(cost)}
    if not whole:
        mean = max(1, round(sum(costs.values()) / len(costs)))
        return Words(dict.fromkeys(words, mean), overhead, False)
    return Words(whole, overhead, True)


async def _takes(client: Client) -> bool:
    """Whether the server accepts the body that the client makes now."""
    try:
        await _prompt_tokens(client, OPENING)
    except RefusedError:
        return False
    return True


async def _prompt_tokens(client: Client, prompt: str) -> int | None:
    """Tokens of a prompt as the server counts them; None where it reports no usage."""
    waits = list(BUSY_WAITS)
    while True:
        try:
            usage = read_usage((await client.whole(prompt, 1)).get("usage"))
            return usage.prompt if usage else None
        except ShapeError as error:
            raise NearfarError(f"{client.url}: {error}") from error
        except RemoteError as error:
            if not error.busy or not waits:
                raise
        await asyncio.sleep(waits.pop(0))
