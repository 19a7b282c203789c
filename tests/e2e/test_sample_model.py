"""What the sample model is said to be able to do (examples/sample-model/README.md), it does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nearfar.edge_runtime import AsyncEngine
from tests.support.artifacts import Built
from tests.support.paths import ROOT


@pytest.mark.parametrize("target", ["cpu"])
def test_it_answers_what_it_was_not_taught(
    built: Built, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """At 4 bits, greedily: at least 95 of the 100 questions that training never saw."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from sample.questions import held_out

    asks = held_out()
    assert len({ask.question for ask in asks}) == 100

    async def answers() -> list[str]:
        async with await AsyncEngine.load(
            built.of(ROOT / "examples" / "sample-model", "q4") / "cpu"
        ) as engine:

            async def answer(question: str) -> str:
                messages: list[Any] = [{"role": "user", "content": question}]
                made = await engine.chat.completions.create(messages=messages, temperature=0, max_tokens=200)
                return str(made.choices[0].message.content)

            return await asyncio.gather(*(answer(ask.question) for ask in asks))

    wrong = [
        (ask.question, said)
        for ask, said in zip(asks, asyncio.run(answers()), strict=True)
        if not ask.judge(said)
    ]
    assert len(wrong) <= 5, wrong
