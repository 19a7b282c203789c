"""Accounts of the cloud's costs, by conversation and by day, in the policy's unit (tokens or money)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMEMBERED = 1000
"""Conversations that are remembered; the least recently used are forgotten first."""


class Ledger:
    """Costs are reserved before a call, at their maximum, and settled after it, so that simultaneous calls
    cannot exceed a budget together.

    Days are strings like "2026-01-31"; a new day begins at 0. Reservations are not kept between starts.
    """

    def __init__(self) -> None:
        self._day = ""
        self._spent = 0.0
        self._conversations: dict[str, float] = {}
        self._reserved: dict[int, tuple[str | None, float]] = {}
        self._next = 1

    def spent_day(self, day: str) -> float:
        """The day's costs, reservations included."""
        settled = self._spent if day == self._day else 0.0
        return settled + sum(cost for _, cost in self._reserved.values())

    def spent_conversation(self, conversation: str | None) -> float:
        """A conversation's costs, reservations included; 0 without an id."""
        if conversation is None:
            return 0.0
        reserved = sum(cost for owner, cost in self._reserved.values() if owner == conversation)
        return self._conversations.get(conversation, 0.0) + reserved

    def reserve(self, conversation: str | None, cost: float) -> int:
        """Reserve the most that a call may cost. Returns the number for `settle`."""
        number, self._next = self._next, self._next + 1
        self._reserved[number] = (conversation, cost)
        return number

    def settle(self, number: int, day: str, cost: float) -> None:
        """Replace a reservation by the call's actual cost. A number that is settled already is ignored."""
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
        """Return the state to keep between starts."""
        return {"day": self._day, "spent": self._spent, "conversations": dict(self._conversations)}

    @classmethod
    def restored(cls, data: Mapping[str, Any]) -> Ledger:
        """Restore from a kept state."""
        made = cls()
        made._day, made._spent = str(data.get("day", "")), float(data.get("spent", 0.0))
        made._conversations = {
            str(name): float(cost) for name, cost in dict(data.get("conversations", {})).items()
        }
        return made
