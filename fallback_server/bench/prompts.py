"""Makes texts of a wanted number of tokens for any tokenizer, without having the tokenizer.

Tokenizers split at blanks before anything else. So the tokens of a text of words are the sum of its words'
tokens, plus what the chat template and the opening add (the overhead). Both are measured with the server's
own `usage.prompt_tokens` (calibrate.py): a word's cost is the count of a prompt that repeats it, less the
overhead, divided by the repeats. Words that do not cost a whole number of tokens are left out. Where the
server reports no usage, a word counts as one token and the report says so.
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
    """Measured costs: the tokens of each word, and of a prompt with the opening alone (`overhead`)."""

    costs: dict[str, int]
    overhead: int
    exact: bool


def text(words: Words, item: Item, index: int, shared_prefix: int, seed: str) -> str:
    """Return the prompt of a request: `item.prompt_tokens` tokens with the overhead, as near as the words
    allow.

    Where the trace shares nothing, `index` makes the text unlike any other. Equal blocks at equal places give
    equal text.
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
    """Draw words of `tokens` tokens together with a seed; the sum falls short by less than the cheapest
    word.
    """
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
