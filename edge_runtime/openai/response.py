"""The running answers of one request, and the fields that its chunks share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.grammars import Grammar
from nearfar.edge_runtime.openai.answers import AnswerChoice, merge
from nearfar.edge_runtime.openai.context import Fitted
from nearfar.edge_runtime.openai.loaded import LoadedModel
from nearfar.edge_runtime.openai.pieces import Piece, joined
from nearfar.edge_runtime.openai.records import PromptTokensDetails, Usage
from nearfar.edge_runtime.tools.parts import PartReader


@dataclass(frozen=True)
class RunningResponse:
    """The fields that all chunks of a response share, and its answers."""

    id: str
    created: int
    model: str
    answers: list[AnswerChoice]
    left_out: int | None
    """Messages that the context policy left out; None if none."""

    @classmethod
    async def start(
        cls,
        engine: LoadedModel,
        kind: str,
        prompt: Fitted,
        context: Seq[int],
        sampling: SamplingParams,
        n: int,
        grammar: Grammar | None,
        reading: Callable[[], PartReader] | None = None,
    ) -> RunningResponse:
        """Start the requests of a response.

        `context`: tokens that the text of the answers continues. `reading`: makes the reader that splits an
        answer.
        """
        engine.core.check_open()
        constraints = (
            await engine.grammars.constraints(grammar, n, ignore_eos=sampling.ignore_eos)
            if grammar
            else [None] * n
        )
        answers = []
        for index in range(n):
            seed = None if sampling.seed is None else _nth_seed(sampling.seed, index)
            generation = engine.core.generate(prompt.tokens, replace(sampling, seed=seed), constraints[index])
            reader = reading() if reading else None
            answers.append(
                AnswerChoice(
                    index, generation, engine.codec, sampling.stop, context, constraints[index], reader
                )
            )
        name = engine.manifest.model.name
        return cls(f"{kind}-{secrets.token_hex(12)}", int(time.time()), name, answers, prompt.left_out)

    @property
    def head(self) -> dict[str, Any]:
        """Fields with which every record of the response starts."""
        return {"id": self.id, "created": self.created, "model": self.model}

    @property
    def tail(self) -> dict[str, Any]:
        """Usage and timings of complete answers. The prompt counts once, however many answers it has."""
        stats = [answer.stats for answer in self.answers]
        prompt, generated = stats[0].prompt_tokens, sum(s.completion_tokens for s in stats)
        details = PromptTokensDetails(stats[0].cached_tokens, self.left_out)
        return {"usage": Usage(prompt, generated, prompt + generated, details), "timings": stats}

    async def aclose(self) -> None:
        """Stop all answers."""
        for answer in self.answers:
            await answer.aclose()

    async def collect(self) -> list[Piece]:
        """Every answer as one piece."""
        pieces: list[list[Piece]] = [[] for _ in self.answers]
        try:
            async with aclosing(merge(self.answers)) as merged:
                async for piece in merged:
                    pieces[piece.index].append(piece)
        finally:
            await self.aclose()
        return [joined(index, of) for index, of in enumerate(pieces)]


def _nth_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: all seeds of a response differ, and the first is `seed` itself."""
    return (seed + index) & (2**64 - 1)
