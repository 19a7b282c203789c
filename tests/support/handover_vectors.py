"""Replays tests/vectors/routing/handover on Python's table."""

from __future__ import annotations

from typing import Any

from nearfar.routing.handover import Event, Rules, State, begin, step
from nearfar.routing.types import Reason

Json = dict[str, Any]
LOW = Reason("low_logprob", "device", -3.0, -2.0)


def event(line: str) -> Event:
    """An event of its line."""
    kind, *words = line.split()
    side: Any = words[0] if words else None
    if kind == "piece":
        finish = next((word[1:] for word in words if word.startswith("=")), None)
        low = LOW if "low" in words else None
        return Event("piece", side, int(words[1]), "calls" not in words, finish, low)
    code = next((word for word in words[1:] if word != "unwatched"), None)
    return Event(kind, side, code=code, unwatched="unwatched" in words)  # type: ignore[arg-type]


def outcome(state: State) -> Json:
    """What is told of the answer at the end."""
    return {
        "phase": state.phase, "shown": state.shown, "finish": state.finish, "path": list(state.path), "degraded": state.degraded,
        "reasons": [[reason.code, reason.side, reason.value] for reason in state.reasons],
    }  # fmt: skip


def replay(script: Json) -> tuple[list[list[str]], Json]:
    """The actions of each event, and the outcome."""
    rules = Rules(**script["rules"])
    state = begin(rules, script["begin"])
    actions = []
    for line in script["events"]:
        state, done = step(rules, state, event(line))
        actions.append([str(action) for action in done])
    return actions, outcome(state)
