"""Before the load: which model, how long its context is, what the server takes, and what words cost in its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from nearfar.errors import NearfarError
from nearfar.fallback_server.bench.client import Client
from nearfar.fallback_server.bench.prompts import OPENING, WORDS, Words

REPEATS = 4
AT_ONCE = 4
BUSY_WAITS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds to wait when a server that others use, or that takes little at once, answers 429."""


@dataclass(frozen=True)
class Server:
    """What is known of the server. `notes`: what the reader of the figures should know."""

    url: str
    model: str
    context: int | None
    ignore_eos: bool
    words: Words
    notes: tuple[str, ...] = ()


async def look(client: Client, words: Sequence[str] = WORDS) -> Server:
    """Ask the server; sets the client's model and `ignore_eos`."""
    notes = []
    listed = [entry for entry in (await client.get("/models")).get("data", ()) if "id" in entry]
    names = [entry["id"] for entry in listed]
    if not client.model and not names:
        raise NearfarError(f"{client.url} lists no model: name one with --model")
    client.model = client.model or names[0]
    context = next((entry.get("max_model_len") for entry in listed if entry["id"] == client.model), None)
    if context is None:
        notes.append("The server does not tell its context length: lengths are not cut to it (see --max-prompt).")
    if client.ignore_eos and (await client.whole(OPENING, 1)).status_code in (400, 422):
        client.ignore_eos = False
        if (await client.whole(OPENING, 1)).status_code == 200:
            notes.append("The server refuses ignore_eos: answers may be shorter than asked for.")
    measured = await _measure(client, words)
    if not measured.exact:
        notes.append("The server tells no usage: a word counts for one token, a piece of an answer too.")
    return Server(client.url, client.model, context, client.ignore_eos, measured, tuple(notes))


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


async def _prompt_tokens(client: Client, prompt: str) -> int | None:
    for wait in BUSY_WAITS:
        response = await client.whole(prompt, 1)
        if response.status_code != 429:
            break
        await asyncio.sleep(wait)
    if response.status_code != 200:
        raise NearfarError(f"{response.url} answers {response.status_code}: {response.text:.300}")
    usage = response.json().get("usage") or {}
    found = usage.get("prompt_tokens")
    return found if isinstance(found, int) else None
