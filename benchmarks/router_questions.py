"""Questions of many kinds with results that a program can check, for router_evidence.py.

Kinds differ in how well small models answer them: arithmetic, letters, facts, dates, logic, code that is read and
code that is written and then run. The numbers are drawn from fixed seeds.
"""

# ruff: noqa: E501
# Questions stand on lines of their own, as long as they are.
from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

Row = dict[str, str]
EACH = 24
"""Questions of each kind."""

WORDS = [
    "planet",
    "garden",
    "window",
    "silver",
    "bottle",
    "market",
    "doctor",
    "engine",
    "forest",
    "guitar",
    "hammer",
    "island",
    "jacket",
    "kitchen",
    "ladder",
    "mirror",
    "needle",
    "orange",
    "pepper",
    "rabbit",
    "saddle",
    "tunnel",
    "velvet",
    "wallet",
    "yellow",
    "zipper",
    "bridge",
    "camera",
    "dragon",
    "feather",
]
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
    "Mongolia": "Ulaanbaatar", "Bhutan": "Thimphu", "Burkina Faso": "Ouagadougou", "Kyrgyzstan": "Bishkek",
    "Suriname": "Paramaribo", "Vanuatu": "Port Vila", "Italy": "Rome", "Canada": "Ottawa", "Australia": "Canberra",
    "Eritrea": "Asmara", "Latvia": "Riga", "Slovenia": "Ljubljana", "Laos": "Vientiane", "Malawi": "Lilongwe",
    "Spain": "Madrid", "Tajikistan": "Dushanbe", "Guyana": "Georgetown", "Moldova": "Chisinau",
}  # fmt: skip
NAMES = ["Anna", "Ben", "Clara", "David", "Emma"]
SNIPPETS = (
    "x = {a}\nfor i in range({d}):\n    x += i\nprint(x)",
    "print(sum(n for n in range({a}) if n % {d} == 0))",
    "s = '{w}'\nprint(s[{d}:] + s[:{d}])",
    "d = {{'a': {a}, 'b': {b}}}\nd['a'] -= {d}\nprint(d['a'] * 2 + d['b'])",
    "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nprint(f({d} + 4))",
    "print(len([c for c in '{w}' if c in 'aeiou']) + {a})",
)
TASKS = (
    ("returns the sum of the even numbers in a list", "f([1, 2, 3, 4]) == 6 and f([]) == 0"),
    ("returns whether a string reads the same backwards", "f('abba') and not f('abc') and f('')"),
    ("returns the n-th Fibonacci number, with f(0) = 0 and f(1) = 1", "f(10) == 55 and f(0) == 0"),
    ("returns the words of a string in reverse order, joined by blanks", "f('a b c') == 'c b a'"),
    ("returns the second largest distinct number of a list", "f([3, 1, 3, 2]) == 2"),
    ("returns the greatest common divisor of two numbers", "f(12, 18) == 6 and f(7, 3) == 1"),
    ("returns whether a number is prime", "f(13) and not f(1) and not f(9) and f(2)"),
    ("returns a dictionary that counts each character of a string", "f('aab') == {'a': 2, 'b': 1}"),
    ("flattens a list of nested lists of any depth", "f([1, [2, [3, []]]]) == [1, 2, 3]"),
    ("returns the length of the longest run of equal elements in a list", "f([1, 1, 2, 2, 2]) == 3 and f([]) == 0"),
    ("converts a Roman numeral to a number", "f('XIV') == 14 and f('MCMXC') == 1990"),
    ("returns all permutations of a string as a sorted list without duplicates", "f('aab') == ['aab', 'aba', 'baa']"),
    ("returns the number of days between two dates written as YYYY-MM-DD", "f('2024-02-28', '2024-03-01') == 2"),
    ("merges overlapping intervals, given as a list of pairs", "[list(x) for x in f([[1, 3], [2, 5], [7, 8]])] == [[1, 5], [7, 8]]"),
    ("evaluates an arithmetic expression in reverse Polish notation, given as a string", "f('3 4 + 2 *') == 14"),
    ("returns the edit distance of two strings", "f('kitten', 'sitting') == 3"),
    ("returns the sum of the digits of a number", "f(1234) == 10 and f(0) == 0"),
    ("removes duplicates from a list and keeps the order", "f([3, 1, 3, 2, 1]) == [3, 1, 2]"),
    ("returns the transpose of a matrix given as a list of lists", "[list(x) for x in f([[1, 2], [3, 4]])] == [[1, 3], [2, 4]]"),
    ("returns the run-length encoding of a string, such as 'aab' → 'a2b1'", "f('aab') == 'a2b1'"),
    ("returns the longest common prefix of a list of strings", "f(['flow', 'flower', 'flat']) == 'fl'"),
    ("returns whether brackets ()[]{} in a string are balanced", "f('([]{})') and not f('(]') and not f('(')"),
    ("returns the n-th row of Pascal's triangle, row 0 being [1]", "f(4) == [1, 4, 6, 4, 1]"),
    ("returns the smallest number of coins of the values in a list that make an amount", "f([1, 3, 4], 6) == 2"),
)  # fmt: skip
SECONDS = 5.0
LAST_FUNCTION = (
    "f = globals().get('f') or [v for v in list(globals().values()) if hasattr(v, '__code__')][-1]"
)
"""Code that finds the function of an answer, whatever its name."""


def _arithmetic(rng: random.Random, at: int) -> tuple[str, str]:
    a, b, c = (rng.randint(10, (99, 999)[at % 2]) for _ in range(3))
    return ((f"{a} + {b} + {c}", str(a + b + c)), (f"{a} * {b}", str(a * b)), (f"{a} - {b}", str(a - b)))[
        at % 3
    ]


def _sum(rng: random.Random, at: int) -> tuple[str, str]:
    text, truth = _arithmetic(rng, at)
    return f"What is {text}? Reply with the number only.", truth


def _german(rng: random.Random, at: int) -> tuple[str, str]:
    text, truth = _arithmetic(rng, at)
    return f"Was ist {text}? Antworte nur mit der Zahl.", truth


def _chinese(rng: random.Random, at: int) -> tuple[str, str]:
    text, truth = _arithmetic(rng, at)
    return f"{text} 等于多少？只回答数字。", truth


def _letters(rng: random.Random, at: int) -> tuple[str, str]:
    word = rng.choice(WORDS)
    if at % 3 == 0:
        return f'Spell "{word}" backwards. Reply with the word only.', word[::-1]
    if at % 3 == 1:
        letter = rng.choice(word)
        return f'How often does the letter {letter} occur in "{word}"? Reply with the number only.', str(
            word.count(letter)
        )
    return f'What is letter number {(n := rng.randint(2, 6))} of "{word}"? Reply with the letter only.', word[
        n - 1
    ]


def _facts(_: random.Random, at: int) -> tuple[str, str]:
    country = list(CAPITALS)[at % len(CAPITALS)]
    return f"What is the capital of {country}? Reply with its name only.", CAPITALS[country]


def _dates(rng: random.Random, at: int) -> tuple[str, str]:
    day = date(2026, 1, 1) + timedelta(rng.randint(0, 360))
    later = (3, 10, 45, 100)[at % 4]
    asked = f"Today is {day:%A}. Which day of the week is it in {later} days? Reply with the day only."
    return asked, f"{day + timedelta(later):%A}"


def _logic(rng: random.Random, at: int) -> tuple[str, str]:
    names = rng.sample(NAMES, 3 + at % 3)
    said = [f"{first} is taller than {second}." for first, second in itertools.pairwise(names)]
    rng.shuffle(said)
    which = at % 2
    return f"{' '.join(said)} Who is the {('tallest', 'shortest')[which]}? Reply with the name only.", names[
        -which
    ]


def _sorting(rng: random.Random, at: int) -> tuple[str, str]:
    words = rng.sample(WORDS, 4 + at % 4)
    return (
        f"Sort these words alphabetically: {', '.join(words)}. Reply with the sorted words only, separated by commas.",
        ", ".join(sorted(words)),
    )


def _bases(rng: random.Random, at: int) -> tuple[str, str]:
    number = rng.randint(5, (31, 255)[at % 2])
    if at % 4 < 2:
        return (
            f"What is the decimal number {number} in binary? Reply with the binary digits only.",
            f"{number:b}",
        )
    return f"What is the binary number {number:b} in decimal? Reply with the number only.", str(number)


def _reading(rng: random.Random, at: int) -> tuple[str, str]:
    code = SNIPPETS[at % len(SNIPPETS)].format(
        a=rng.randint(5, 40), b=rng.randint(2, 30), d=rng.randint(2, 5), w=rng.choice(WORDS)
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {})
    return (
        f"What does this Python program print?\n\n{code}\n\nReply with the output only.",
        shown.getvalue().strip(),
    )


def _writing(_: random.Random, at: int) -> tuple[str, str]:
    task, test = TASKS[at % len(TASKS)]
    return f"Write a Python function f that {task}. Reply with the code only, without examples.", test


KINDS: dict[str, tuple[Callable[[random.Random, int], tuple[str, str]], str]] = {
    "sum": (_sum, "en"), "sum-de": (_german, "de"), "sum-zh": (_chinese, "zh"), "letters": (_letters, "en"),
    "facts": (_facts, "en"), "dates": (_dates, "en"), "logic": (_logic, "en"), "sorting": (_sorting, "en"),
    "bases": (_bases, "en"), "reading": (_reading, "en"), "writing": (_writing, "en"),
}  # fmt: skip
"""What makes a question of each kind, and its language."""


def varied() -> list[Row]:
    """EACH questions of each kind, with their results."""
    made = []
    for kind, (make, language) in KINDS.items():
        rng = random.Random(kind)
        for at in range(EACH):
            question, truth = make(rng, at)
            row = {"id": f"{kind}-{at}", "kind": kind, "language": language}
            made.append({**row, "question": question, "truth": truth})
    return made


def checked(row: Row, text: str) -> bool:
    """Whether an answer to a question of `varied` is right: by running its code, or by its words."""
    if row["kind"] == "writing":
        return _runs(text, row["truth"])
    said, truth = _plain(text), _plain(row["truth"])
    return said[-len(truth) :] == truth


def _plain(text: str) -> Sequence[str]:
    """The words and numbers of a text, without markup."""
    return re.findall(r"-?\d+|\w+", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).lower())


def _runs(text: str, test: str) -> bool:
    """Whether the code of an answer passes a test, in a process of its own."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.S)
    code = found.group(1) if found else text
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"{code}\n\n{LAST_FUNCTION}\nassert {test}"],
            timeout=SECONDS, capture_output=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


NUMBERS = {
    104: ("1", "2"), 111: ("3", ""), 112: ("12000", "2000"), 113: ("19", ""), 115: ("38", ""), 116: ("0", ""),
    117: ("19", "9"), 118: ("0", "3"), 119: ("280", "350"), 120: ("0", "2"),
}  # fmt: skip
"""Results of MT-Bench's turns that are one number, by question and turn, computed by hand: three of GPT-4's reference
answers are wrong (the area of 111, the root of 120, the probability of 114, which is left out).
"""


def turns_of(folder: Path) -> list[dict[str, Any]]:
    """MT-Bench's turns with a number as result, as conversations. GPT-4's reference is the answer to a first turn."""

    def lines(name: str) -> dict[int, Any]:
        rows = map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
        return {row["question_id"]: row for row in rows}

    asked, references = lines("question.jsonl"), lines("reference_answer/gpt-4.jsonl")
    end = ' Think in short steps. End with the line "Answer: <number>".'
    made = []
    for number, results in NUMBERS.items():
        first, second = asked[number]["turns"]
        before = references[number]["choices"][0]["turns"][0]
        history = [{"role": "user", "content": first}, {"role": "assistant", "content": before}]
        for turn, truth in enumerate(results):
            if truth:
                last = {"role": "user", "content": (first, second)[turn] + end}
                row = {"id": f"mt-{number}-{turn}", "kind": "mt-bench", "language": "en", "truth": truth}
                made.append({**row, "messages": [*(history if turn else []), last]})
    return made
