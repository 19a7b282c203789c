"""`engine.decide`: which of several labels answers a prompt, from the model's probabilities, without
generating.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from nearfar.edge_runtime.engine.scoring import score
from nearfar.edge_runtime.openai.label_odds import label_odds
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.messages import checked_messages
from nearfar.edge_runtime.openai.parameters import template_variables, token_prompt
from nearfar.edge_runtime.openai.prompts import END, ChatEncoder
from nearfar.edge_runtime.openai.records import Record
from nearfar.edge_runtime.text.beside import beside, characters
from nearfar.edge_runtime.text.labels import label_tokens
from nearfar.errors import RequestError
from nearfar.format.requests import MAX_LABEL_CHARS, MAX_LABELS

Asked = str | Seq[int] | Seq[Mapping[str, Any]]
"""A prompt: a text, token ids, or the messages of a conversation."""

TAIL_TOKENS = 16
"""Tokens at the end of a prompt that are tokenized again with a label, to see where its tokens begin."""

OPENED = (
    "the chat template begins the answer with reasoning, so that no label can come first: turn it off, for "
    "example with chat_template_kwargs={'enable_thinking': False}"
)


@dataclass(frozen=True)
class Option(Record):
    """A label, and what the model says of it.

    `probability`: among all labels, after calibration. `logprob`: the natural logarithm of the probability
    that an answer begins with the label; the sum of `token_logprobs`.
    """

    label: str
    value: float | None
    probability: float
    logprob: float
    token_logprobs: list[float]


@dataclass(frozen=True)
class Decision(Record):
    """The likeliest label, and all of them in the order of the request.

    `confidence`: 0 where all labels are equally likely, 1 where one has everything. `expected`: the mean of
    the values by their probabilities; None for labels.
    """

    choice: str
    confidence: float
    options: list[Option]
    expected: float | None
    model: str
    prompt_tokens: int


async def decide(
    engine: LoadedModel,
    prompt: Asked,
    labels: Seq[str] | None = None,
    *,
    values: Seq[float] | None = None,
    neutral: Asked | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Decision:
    """Decide between labels, or between numbers. See AsyncEngine.decide."""
    texts = checked_labels(labels, values)
    variables = {} if chat_template_kwargs is None else dict(chat_template_kwargs)
    prompts = [await _encoded(engine, prompt, texts, variables)]
    if neutral is not None:
        prompts.append(await _encoded(engine, neutral, texts, variables))
    # All are checked before one is computed.
    for tokens, given in prompts:
        engine.core.check_scores(tokens, given)
    found = [await score(engine.core, tokens, given) for tokens, given in prompts]
    sums = [[sum(each) for each in made] for made in found]
    odds = label_odds(
        [tuple(each) for each in prompts[0][1]], sums[0], sums[1] if neutral is not None else None
    )
    options = [
        Option(text, None if values is None else float(values[at]), share, sums[0][at], list(found[0][at]))
        for at, (text, share) in enumerate(zip(texts, odds.probabilities, strict=True))
    ]
    expected = None if values is None else sum(o.probability * (o.value or 0.0) for o in options)
    name, count = engine.manifest.model.name, len(prompts[0][0])
    return Decision(texts[odds.choice], odds.confidence, options, expected, name, count)


def checked_labels(labels: object, values: object = None) -> list[str]:
    """The texts of labels or values; RequestError unless they are two or more different ones."""
    what = "labels" if values is None else "values"
    given = labels if values is None else values
    if labels is not None and values is not None:
        raise RequestError("give labels or values, not both", "values")
    if isinstance(given, str | bytes) or not isinstance(given, Seq) or not 2 <= len(given) <= MAX_LABELS:
        raise RequestError(f"{what} must be a list of 2 to {MAX_LABELS}, not {given!r:.80}", what)
    texts = []
    for each in given:
        if values is None and not isinstance(each, str):
            raise RequestError(f"a label must be a text, not {each!r:.80}", what)
        if values is not None and (isinstance(each, bool) or not isinstance(each, int | float)):
            raise RequestError(f"a value must be a number, not {each!r:.80}", what)
        text = each if isinstance(each, str) else f"{each:g}"
        if not 1 <= len(text) <= MAX_LABEL_CHARS:
            raise RequestError(f"a label must have 1 to {MAX_LABEL_CHARS} characters, not {len(text)}", what)
        texts.append(text)
    if len(set(texts)) < len(texts):
        raise RequestError(f"{what} must differ from each other: {given!r:.80}", what)
    return texts


async def _encoded(
    engine: LoadedModel, prompt: Asked, labels: Seq[str], variables: dict[str, Any]
) -> tuple[list[int], list[list[int]]]:
    """The tokens of a prompt, and of each label after it."""
    codec = engine.codec
    if isinstance(prompt, str):
        tokens = await beside(lambda: codec.encode(prompt), len(prompt))
        before = prompt[-END:]
    elif isinstance(prompt, Seq) and prompt and not isinstance(prompt[0], Mapping):
        tokens = token_prompt(prompt)
        engine.core.check_scores(tokens, [[0]])
        before = codec.decode(tokens[-TAIL_TOKENS:])
    else:
        messages = checked_messages(prompt)
        encode = ChatEncoder(codec, variables=template_variables({"chat_template_kwargs": variables}))
        tokens = await beside(lambda: encode(messages), characters(messages))
        if encode.reasoning_open:
            raise RequestError(OPENED, "chat_template_kwargs")
        before = encode.end
    made = await beside(lambda: label_tokens(codec, before, labels), sum(map(len, labels)))
    return tokens, made
