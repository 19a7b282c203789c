"""What the cloud has cost, by conversation and by day, in the policy's unit (tokens or money)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMEMBERED = 1000
"""Conversations that are remembered; those used longest ago are forgotten first."""


class Ledger:
    """Costs are reserved before a call, at their most, and settled after it: calls at once cannot exceed a
    budget together.

    Days are strings such as "2026-01-31"; a new one begins at 0. Reservations are no part of what is kept
    from start to start.
    """

    def __init__(self) -> None:
        self._day = ""
        self._spent = 0.0
        self._conversations: dict[str, float] = {}
        self._reserved: dict[int, tuple[str | None, float]] = {}
        self._next = 1

    def spent_day(self, day: str) -> float:
        """What the day has cost, reservations included."""
        settled = self._spent if day == self._day else 0.0
        return settled + sum(cost for _, cost in self._reserved.values())

    def spent_conversation(self, conversation: str | None) -> float:
        """What a conversation has cost, reservations included; without an id: nothing yet."""
        if conversation is None:
            return 0.0
        reserved = sum(cost for owner, cost in self._reserved.values() if owner == conversation)
        return self._conversations.get(conversation, 0.0) + reserved

    def reserve(self, conversation: str | None, cost: float) -> int:
        """Set aside what a call may cost. Gives the number to settle it by."""
        number, self._next = self._next, self._next + 1
        self._reserved[number] = (conversation, cost)
        return number

    def settle(self, number: int, day: str, cost: float) -> None:
        """The call cost this much after all. A number that is settled already is ignored."""
        if (reserved := self._reserved.pop(number, None)) is None:
            return
        if day != self._day:
            self._day, self._spent = day, 0.0
        self._spent += cost
        if (conversation := reserved[0]) is not None:
            self._conversations[conversation] = self._conversations.pop(conversation, 0.0) + cost
            while len(self._conversations) > REMEMBERED:
                del self._conversations[next(iter(self._conversations))]

    def as_json(self) -> dict[str, Any]:
        """What to keep from start to start."""
        return {"day": self._day, "spent": self._spent, "conversations": dict(self._conversations)}

    @classmethod
    def restored(cls, data: Mapping[str, Any]) -> Ledger:
        """From what was kept."""
        made = cls()
        made._day, made._spent = str(data.get("day", "")), float(data.get("spent", 0.0))
        made._conversations = {
            str(name): float(cost) for name, cost in dict(data.get("conversations", {})).items()
        }
        return made
