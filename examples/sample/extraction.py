"""Questions that ask for a sentence's facts as JSON, for the demonstration of structured output."""

from __future__ import annotations

import json
import random
from typing import Any

from sample.ask import Ask, Judge

NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Finn", "Grace", "Henry", "Ida", "Jack", "Karl", "Lena",
         "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tom", "Vera")  # fmt: skip
CITIES = ("Paris", "Rome", "Berlin", "Madrid", "London", "Vienna", "Oslo", "Lisbon", "Athens", "Warsaw")
FRUIT = ("apples", "pears", "plums", "cherries", "lemons", "oranges", "grapes", "peaches")
SENTENCES = ("{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.",
             "My friend {name} from {city} is {age} years old.")  # fmt: skip
ORDERS = (
    "{name} buys {count} {fruit}.",
    "{name} wants {count} {fruit}, please.",
    "{count} {fruit} for {name}.",
)
BEGIN = ("Give me this as JSON: ", "As JSON: ", "Turn this into JSON: ", "Extract the data as JSON: ")


def ask(rng: random.Random) -> Ask:
    """A question about a person or an order."""
    name, city, fruit = rng.choice(NAMES), rng.choice(CITIES), rng.choice(FRUIT)
    if rng.random() < 0.5:
        person = {"name": name, "age": rng.randint(5, 90), "city": city}
        return _ask(rng.choice(SENTENCES).format(**person), person, rng)
    order = {"name": name, "item": fruit, "count": rng.randint(2, 20)}
    return _ask(rng.choice(ORDERS).format(fruit=fruit, **order), order, rng)


def _ask(sentence: str, record: dict[str, Any], rng: random.Random) -> Ask:
    return Ask("json", rng.choice(BEGIN) + sentence, json.dumps(record), same(record))


def same(record: dict[str, Any]) -> Judge:
    """A judge that accepts answers that are this record as JSON."""

    def judge(text: str) -> bool:
        try:
            return bool(json.loads(text) == record)
        except json.JSONDecodeError:
            return False

    return judge
