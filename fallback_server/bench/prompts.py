"""Texts of a wanted number of tokens, for any tokenizer, without having it.

Tokenizers split at blanks before anything else, so a text of words costs what its words cost, plus what the
chat template and the beginning add (the overhead). Both are measured with the server's own
`usage.prompt_tokens` (calibrate.py): the word repeated, less the overhead, divided by the repeats. Words that
do not cost a whole number of tokens are left out. Where the server tells no usage, a word counts for one
token and the report says so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from nearfar.fallback_server.bench.traces import Item

OPENING = "Text:"
WORDS = [
    "a",
    "I",
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "was",
    "for",
    "on",
    "are",
    "with",
    "they",
    "be",
    "at",
    "one",
    "have",
    "this",
    "from",
    "by",
    "some",
    "what",
]


@dataclass(frozen=True)
class Words:
    """What was measured: tokens of each word, and of a prompt with no words but the opening."""

    costs: dict[str, int]
    overhead: int
    exact: bool


def text(words: Words, item: Item, index: int, shared_prefix: int, seed: str) -> str:
    """The prompt of a request, of `item.prompt_tokens` tokens overhead included, as near as the words allow.

    `index` makes it unlike any other where the trace shares nothing. Equal blocks at equal places give equal
    text.
    """
    left = item.prompt_tokens - words.overhead
    parts = [OPENING]

    def add(tokens: int, name: str) -> None:
        nonlocal left
        chosen = fill(words, min(tokens, left), f"{seed} {name}")
        parts.extend(chosen)
        left -= sum(words.costs[word] for word in chosen)

    add(min(shared_prefix, left - 1), "shared")
    for block in item.blocks[:-1]:
        add(item.block, f"block {block}")
    add(left, f"block {item.blocks[-1]}" if item.blocks else f"request {index}")
    return " ".join(parts)


def fill(words: Words, tokens: int, seed: str) -> list[str]:
    """Words of so many tokens together, drawn with a seed; short by less than the cheapest word."""
    r = random.Random(seed)
    names = list(words.costs)
    cheapest = min(words.costs.values())
    chosen = []
    while tokens >= cheapest:
        word = r.choice(names)
        if words.costs[word] > tokens:
            word = r.choice([name for name in names if words.costs[name] <= tokens])
        chosen.append(word)
        tokens -= words.costs[word]
    return chosen
