"""A question with its answer, and how an answer is judged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Ask:
    """One turn: what is asked, what is answered, and whether another answer would be right too."""

    kind: str
    question: str
    answer: str
    judge: Judge
    subject: str = ""
    """What is asked beneath the words, such as "12 + 30"; the question itself if it is empty."""

    @property
    def held_out(self) -> bool:
        """Whether training never sees this subject, in whatever words: one in ten, by its text."""
        return hashlib.sha256((self.subject or self.question).encode()).digest()[0] < 26


def says(*wanted: str) -> Judge:
    """An answer is right if it has all these words, in any case."""
    return lambda text: all(word.lower() in text.lower() for word in wanted)


def varied(question: str, rng: random.Random) -> str:
    """The question as people type it: with and without capital, mark and politeness."""
    if rng.random() < 0.12:
        begin = rng.choice(
            ("Please tell me: ", "Tell me, ", "Can you tell me: ", "Quick question: ", "Hey, ")
        )
        question = begin + question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    if rng.random() < 0.05:
        question += " Thanks!"
    return question
