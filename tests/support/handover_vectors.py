"""Replays tests/vectors/routing/handover on Python's table."""

from __future__ import annotations

import json
from typing import Any

from nearfar.routing.handover import Event, Rules, State, advance, begin
from nearfar.routing.types import Reason
from tests.support.routing_vectors import VECTORS

Json = dict[str, Any]
LOW = Reason("low_logprob", "device", -3.0, -2.0)


def event(line: str) -> Event:
    """Parse an event from its line."""
    kind, *words = line.split()
    side: Any = words[0] if words else None
    if kind == "piece":
        finish = next((word[1:] for word in words if word.startswith("=")), None)
        low = LOW if "low" in words else None
        return Event("piece", side, int(words[1]), "calls" not in words, finish, low)
    code = next((word for word in words[1:] if word != "unwatched"), None)
    return Event(kind, side, code=code, unwatched="unwatched" in words)  # type: ignore[arg-type]


def outcome(state: State) -> Json:
    """The outcome of the answer, in the form of the vectors."""
    return {
        "phase": state.phase,
        "shown": state.shown,
        "finish": state.finish,
        "path": list(state.path),
        "degraded": state.degraded,
        "reasons": [[reason.code, reason.side, reason.value] for reason in state.reasons],
    }


def replay(script: Json) -> tuple[list[list[str]], Json]:
    """The actions of each event, and the outcome."""
    rules = Rules(**script["rules"])
    state = begin(rules, script["begin"])
    actions = []
    for line in script["events"]:
        state, done = advance(rules, state, event(line))
        actions.append([str(action) for action in done])
    return actions, outcome(state)


TABLES = ("finish", "cut", "refused", "escalation", "hedging", "leaving", "privacy")
_UNPLAYED = ("silent", "barred", "low", "left", "unwatched", "lost", "stalled", "connection")
"""Words of events that two HTTP servers cannot produce, or only by chance."""


def load(name: str) -> list[Json]:
    """The scripts of one file."""
    return list(json.loads((VECTORS / "handover" / f"{name}.json").read_text(encoding="utf-8")))


def playable(script: Json) -> bool:
    """Whether the client over two servers can run the script."""
    words = {word for line, _ in script["steps"] for word in line.split()}
    late = any(not actions and not line.startswith(("ended", "failed")) for line, actions in script["steps"])
    if words & set(_UNPLAYED) or late or script["rules"]["private"] or script["rules"]["watched"]:
        return False
    parts = [part for side in parts_of(script).values() for part in side]
    return not any(line.startswith("refused") for part in parts for line in part[1:])


def parts_of(script: Json) -> dict[str, list[list[str]]]:
    """For each side, the events of each request that it gets."""
    parts: dict[str, list[list[str]]] = {"device": [], "cloud": []}
    for line, actions in script["steps"]:
        if line not in ("start", "admitted"):
            parts[line.split()[1]][-1].append(line)
        for action in actions:
            if action.startswith("open "):
                parts[action.split()[1]].append([])
    return parts
