"""A question with its answer, and how an answer is judged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Ask:
    """One turn: the question, the answer, and a judge of other answers."""

    kind: str
    question: str
    answer: str
    judge: Judge
    subject: str = ""
    """The subject behind the wording, such as "12 + 30"; empty for the question itself."""

    @property
    def held_out(self) -> bool:
        """Whether this subject is held out of training in any wording: one in ten, chosen by a hash of its
        text.
        """
        return hashlib.sha256((self.subject or self.question).encode()).digest()[0] < 26


def says(*wanted: str) -> Judge:
    """A judge that accepts answers with all these words, in any case."""
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
