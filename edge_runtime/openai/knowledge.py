"""What the model shows about a prompt when it has read it, before it answers.

A read prompt keeps its keys and values until the answer has begun (`ReadPrompt`), so that the answer computes
its last token again, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.requests import Request, ScoredRow
from nearfar.edge_runtime.engine.scoring import NOTHING_SAMPLED, score
from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.prompts import ChatEncoder
from nearfar.edge_runtime.openai.records import Record
from nearfar.edge_runtime.text.beside import beside, characters
from nearfar.edge_runtime.text.labels import label_tokens

SURE = "Can you answer this correctly? Reply with one word, Yes or No."
"""The question to the model itself, as the user's next words."""
ANSWERS = ("Yes", "No")
LAST_ROWS = 64
"""The last positions of a prompt of which some are scored, for its perplexity: only rows that are computed
anyway, and rows of logits that a step has left.
"""


@dataclass(frozen=True)
class Knowledge(Record):
    """What a model shows about a prompt. Logarithms are natural.

    `prompt_tokens`: its length. `top`: log-probabilities of the likeliest first tokens of the answer, in
    descending order. `prompt_logprob`: the mean log-probability of some of the prompt's last tokens; None if
    they were in the cache. `sure`: the log-odds of the answer Yes to the question whether it can answer; None
    if it was not asked. `row`: ids of tokens with their log-probabilities as the first token, to 4 digits:
    the last hidden row as the output matrix shows it.
    """

    prompt_tokens: int
    top: tuple[float, ...]
    prompt_logprob: float | None
    sure: float | None
    row: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A prompt that the model has read: what it shows, and its sequence in the cache.

    An answer that starts before `release` shares all keys and values of the prompt with it (those of the last
    page as a copy; a model with recurrent states starts at its last border). Another request that finds no
    room takes the pages.
    """

    knowledge: Knowledge
    _reading: Generation

    async def release(self) -> None:
        """Give up the sequence. Its whole pages stay in the prefix index while there is room."""
        await self._reading.aclose()


async def read_prompt(
    engine: LoadedModel,
    messages: Seq[Mapping[str, Any]],
    *,
    ask: bool = True,
    tokens: Seq[int] = (),
    variables: Mapping[str, Any] | None = None,
) -> ReadPrompt:
    """Read a conversation. `ask`: also ask the model itself. `tokens`: ids for `row`, which cost nothing.

    The question costs a prompt of its own, of which all but the last tokens are in the cache. The caller
    releases the result when the answer has begun or goes elsewhere.
    """
    given = checked_messages(messages)
    encode = ChatEncoder(engine.codec, variables=variables)
    prompt = await beside(lambda: encode(given), characters(given))
    engine.core.check_scores(prompt, [[0], *([token] for token in tokens)])
    last, asked = len(prompt) - 1, tuple(tokens)
    before = range(max(last - LAST_ROWS, 0), last)
    rows = (*(ScoredRow(at, (prompt[at + 1],), optional=True) for at in before), ScoredRow(last, asked))
    reading = engine.core.start(Request(tuple(prompt), NOTHING_SAMPLED, 0, 0, scored=rows, held=True))
    try:
        scores = dict((await anext(reading)).scores or {})
        first = scores.pop(last)
        own = [each.logprobs[0] for each in scores.values()]
        made = Knowledge(
            len(prompt),
            first.top,
            sum(own) / len(own) if own else None,
            await _sure(engine, given, variables) if ask else None,
            tuple((token, round(each, 4)) for token, each in zip(asked, first.logprobs, strict=True)),
        )
    except BaseException:
        await reading.aclose()
        raise
    return ReadPrompt(made, reading)


async def _sure(
    engine: LoadedModel, given: Seq[Mapping[str, Any]], variables: Mapping[str, Any] | None
) -> float | None:
    """The log-odds of Yes, as the user's next words after the conversation; None if it does not fit."""
    last = given[-1]
    if last["role"] != "user" or not isinstance(last["content"], str):
        return None
    asked = [*given[:-1], {**last, "content": f"{last['content']}\n\n{SURE}"}]
    encode = ChatEncoder(engine.codec, variables=variables)
    tokens = await beside(lambda: encode(asked), characters(asked))
    if encode.reasoning_open or len(tokens) + 8 > engine.context:
        return None
    labels = label_tokens(engine.codec, encode.end, ANSWERS)
    found = await score(engine.core, tokens, labels)
    odds = label_odds([tuple(each) for each in labels], [sum(each) for each in found])
    yes = min(max(odds.probabilities[0], 1e-9), 1 - 1e-9)
    return math.log(yes / (1 - yes))
