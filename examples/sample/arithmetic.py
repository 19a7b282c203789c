"""Questions of arithmetic: sums and differences of numbers up to 99, products up to 12 times 12, comparisons,
neighbours.
"""

from __future__ import annotations

import random
import re

from sample.ask import Ask, Judge

WORDS = {"+": "plus", "-": "minus", "*": "times"}
FORMS = (
    "What is {a} {word} {b}?",
    "How much is {a} {word} {b}?",
    "What is {a} {sign} {b}?",
    "{a} {sign} {b} = ?",
    "{a} {sign} {b}",
    "Calculate {a} {sign} {b}.",
    "{a} {word} {b}?",
)


def calculation(rng: random.Random) -> Ask:
    """A sum, a difference or a product."""
    sign = rng.choice("++--*")
    a, b = (
        (rng.randint(0, 12), rng.randint(0, 12)) if sign == "*" else (rng.randint(0, 99), rng.randint(0, 99))
    )
    if sign == "-" and a < b:
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    shown = "x" if sign == "*" and rng.random() < 0.5 else sign
    question = rng.choice(FORMS).format(a=a, b=b, sign=shown, word=WORDS[sign])
    # Sums are learnt as a rule. Products are learnt by heart: of these, wordings are held out, not numbers.
    subject = question if sign == "*" else f"{a} {sign} {b}"
    return Ask("arithmetic", question, f"{a} {sign} {b} = {result}", number(result), subject)


def comparison(rng: random.Random) -> Ask:
    """A question which of two numbers is larger or smaller."""
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        form = rng.choice(("Which is larger, {a} or {b}?", "Which number is bigger, {a} or {b}?"))
        return Ask("arithmetic", form.format(a=a, b=b), f"{max(a, b)} is larger.", number(max(a, b)))
    form = rng.choice(("Which is smaller, {a} or {b}?", "Which number is smaller, {a} or {b}?"))
    return Ask("arithmetic", form.format(a=a, b=b), f"{min(a, b)} is smaller.", number(min(a, b)))


def neighbour(rng: random.Random) -> Ask:
    """The number before or after one."""
    a = rng.randint(1, 99)
    if rng.random() < 0.5:
        form = rng.choice(("What comes after {a}?", "Which number comes after {a}?"))
        return Ask("arithmetic", form.format(a=a), f"{a + 1} comes after {a}.", number(a + 1, 1))
    form = rng.choice(("What comes before {a}?", "Which number comes before {a}?"))
    return Ask("arithmetic", form.format(a=a), f"{a - 1} comes before {a}.", number(a - 1, 1))


def number(wanted: int, place: int = 0) -> Judge:
    """A judge that accepts an answer whose last number is `wanted`; with `place` 1, its first number."""

    def judge(text: str) -> bool:
        found = re.findall(r"\d+", text)
        if not found:
            return False
        # "7 is larger." and "3 + 4 = 7" end with what was asked for; "8 comes after 7." begins with it.
        return int(found[0 if place else -1]) == wanted

    return judge


def ask(rng: random.Random) -> Ask:
    """One of these questions, most often a calculation."""
    return rng.choices((calculation, comparison, neighbour), (8, 1, 1))[0](rng)
