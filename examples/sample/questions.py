"""Chooses the taught questions and their shares, and those that are held out for the test at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sample import arithmetic, extraction, facts, stories
from sample.ask import Ask

SHARES = {"nearfar": 0.2, "facts": 0.24, "talk": 0.06, "arithmetic": 0.36, "stories": 0.06, "json": 0.08}
"""Shares of the kinds among the taught turns. Stories are long: by tokens they have the largest share."""
HELD_OUT = {"nearfar": 20, "facts": 30, "arithmetic": 30, "stories": 5, "json": 15}
"""Numbers of questions of each kind in the test at the end: one hundred in all."""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer in one sentence.",
                  "You are the sample model of nearfar.", "You answer briefly.")  # fmt: skip


class Questions:
    """Draws questions; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._facts = facts.every(facts.read())

    def draw(self, kind: str) -> Ask:
        """One question of a kind, taught or held out."""
        if kind in ("nearfar", "facts", "talk"):
            return facts.asks(self._rng, kind, self._facts)
        return {"arithmetic": arithmetic.ask, "stories": stories.ask, "json": extraction.ask}[kind](self._rng)

    def conversations(self) -> Iterator[list[dict[str, str]]]:
        """Endless conversations of one to four turns, without what is held out."""
        kinds, shares = list(SHARES), list(SHARES.values())
        while True:
            messages: list[dict[str, str]] = []
            if self._rng.random() < 0.3:
                messages.append({"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)})
            turns = self._rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]
            while turns:
                ask = self.draw(self._rng.choices(kinds, shares)[0])
                if ask.held_out:
                    continue
                messages += [{"role": "user", "content": ask.question}]
                messages += [{"role": "assistant", "content": ask.answer}]
                turns -= 1
            yield messages


def held_out(seed: int = 2026) -> list[Ask]:
    """One hundred questions that no conversation has, each once, in the shares of HELD_OUT."""
    questions, found = Questions(seed), dict[str, Ask]()
    for kind, count in HELD_OUT.items():
        left = count
        while left:
            ask = questions.draw(kind)
            if ask.held_out and ask.question not in found:
                found[ask.question] = ask
                left -= 1
    return list(found.values())
