"""Log-probabilities without generating: of given texts after a prompt, in one batch of branches that start
from the prompt's keys and values, and of the prompt's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.requests import Request, RowScores, ScoredRow
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.together import together

NOTHING_SAMPLED = SamplingParams(max_tokens=1)
AT_ONCE = 8
"""The most branches of one call that run at a time: a long list of labels leaves slots to other requests."""

Label = tuple[int, ...]


async def score(
    core: EngineCore, prompt: Seq[int], labels: Seq[Seq[int]], salt: str = ""
) -> list[tuple[float, ...]]:
    """The log-probabilities of each label's tokens as the continuation of a prompt.

    The prompt is computed once. Labels of several tokens branch off from its pages; equal ones are computed
    once. RequestError for ids outside the vocabulary and for what does not fit the context.
    """
    core.check_scores(prompt, labels)
    given, distinct = tuple(prompt), dict.fromkeys(tuple(label) for label in labels)
    firsts = tuple(dict.fromkeys(label[0] for label in distinct))
    longer = [label for label in distinct if len(label) > 1]
    last = len(given) - 1
    trunk = core.start(_request(given, (ScoredRow(last, firsts),), salt, held=bool(longer)))
    try:
        event = await anext(trunk)
        assert event.scores is not None
        first = dict(zip(firsts, event.scores[last].logprobs, strict=True))
        rest = await _branches(core, given, longer, salt)
    finally:
        await trunk.aclose()
    return [(first[label[0]], *rest.get(tuple(label), ())) for label in labels]


async def prompt_scores(
    core: EngineCore, prompt: Seq[int], first: int = 1, salt: str = ""
) -> tuple[RowScores, ...]:
    """The scores of a prompt's tokens from token `first` on, which is at least 1: the token at 0 follows
    nothing. Each of them has one log-probability.

    The prompt is computed from the row before `first` on, in steps of as many rows as a step has rows of
    logits. A request for the same prompt finds it in the cache. RequestError as in `score`.
    """
    rows = tuple(ScoredRow(at - 1, (prompt[at],)) for at in range(first, len(prompt)))
    if not rows:
        return ()
    core.check_scores(prompt[:-1], [prompt[-1:]])
    reading = core.start(_request(tuple(prompt[:-1]), rows, salt))
    try:
        event = await anext(reading)
    finally:
        await reading.aclose()
    assert event.scores is not None
    return tuple(event.scores[row.position] for row in rows)


async def _branches(
    core: EngineCore, prompt: tuple[int, ...], labels: Seq[Label], salt: str
) -> dict[Label, tuple[float, ...]]:
    """The log-probabilities of the second and later tokens of labels."""
    found: dict[Label, tuple[float, ...]] = {}
    waiting = iter(labels)

    async def work() -> None:
        for label in waiting:
            found[label] = await _branch(core, prompt, label, salt)

    await together(work, min(AT_ONCE, len(labels)))
    return found


async def _branch(core: EngineCore, prompt: tuple[int, ...], label: Label, salt: str) -> tuple[float, ...]:
    rows = tuple(ScoredRow(len(prompt) + at, (token,)) for at, token in enumerate(label[1:]))
    branch = core.start(_request((*prompt, *label[:-1]), rows, salt))
    try:
        event = await anext(branch)
    finally:
        await branch.aclose()
    assert event.scores is not None
    return tuple(event.scores[row.position].logprobs[0] for row in rows)


def _request(tokens: tuple[int, ...], rows: tuple[ScoredRow, ...], salt: str, held: bool = False) -> Request:
    return Request(tokens, NOTHING_SAMPLED, 0, 0, scored=rows, salt=salt, held=held)
