"""Grammars and scored prompts in the torch engine: grammars have a time limit of their own and are sent once;
few logits are kept at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearfar.edge_runtime.grammars import BoundedCache, Grammar
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import Sampling, TokenRequest
from nearfar.fallback_server.grammars import TokenConstraint
from nearfar.fallback_server.torch_engine import client
from nearfar.fallback_server.torch_engine.client import TorchBackend
from nearfar.fallback_server.torch_engine.messages import Forget, Learn, encode
from nearfar.fallback_server.torch_engine.options import TorchOptions
from tests.support.late import late
from tests.support.processes import descendants_that_run
from tests.support.servers import tiny_checkpoint
from tests.support.torch_rig import GREEDY, Rig, model

SAMPLING = "nearfar.fallback_server.torch_engine.sampling"
late(SAMPLING, "transformers", "torch", "xgrammar")  # skips these tests if one of the packages is absent

END = frozenset({257})
DIGITS = Grammar("regex", "[0-9]{6}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def asked(name: str, grammar: Grammar | None = None, **more: Any) -> TokenRequest:
    return TokenRequest(name, (72, 105), 12, GREEDY, grammar=grammar, stop_token_ids=END, **more)


def test_the_rig_knows_a_model_by_its_content(checkpoint: Path, tmp_path: Path) -> None:
    """pytest may give a folder of the same path to a later test, with another model."""
    once = model(checkpoint)
    assert model(tiny_checkpoint(tmp_path)) is once
    tiny_checkpoint(tmp_path, context=512)
    assert model(tmp_path) is not once


def test_a_grammar_that_is_too_slow_ends_its_own_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Rig(checkpoint).tokens([asked("free")])[0]
    monkeypatch.setattr(TokenConstraint, "STEP_SECONDS", -1.0)  # every matcher takes longer than this
    rig = Rig(checkpoint)
    rig.submit(asked("slow", DIGITS))
    rig.run([asked("free")])
    while rig.engine.counters.waiting:  # the grammar is still being compiled
        rig.engine.handle(rig.inbox.get(timeout=60))
    while rig.engine.busy:
        rig.engine.turn()
    with pytest.raises(RequestError, match="too long to follow"):
        rig.events("slow")
    assert [event.token for event in rig.events("free")] == alone
    rig.assert_empty()
    rig.engine.close()


@pytest.mark.parametrize(
    ("regex", "more", "tokens"),
    [
        ("H*", {"held_token_ids": END}, [39] * 12),
        ("H?", {"held_token_ids": END}, [39, 257]),
        ("H*", {"min_tokens": 3}, [39, 39, 39, 257]),
        ("H?", {"min_tokens": 4}, [39, 257]),
        (None, {"min_tokens": 0}, [257]),
        (None, {"min_tokens": 2, "stop_token_ids": END | {72}}, "other"),
    ],
)
def test_end_tokens_are_held_back_as_far_as_the_grammar_goes_on(
    checkpoint: Path, regex: str | None, more: dict[str, Any], tokens: Any
) -> None:
    rig = Rig(checkpoint)
    grammar = None if regex is None else Grammar("regex", regex)
    wanting = Sampling(temperature=0, logit_bias={257: 100})
    given = {"stop_token_ids": END, **more}
    got = rig.tokens([TokenRequest("a", (72, 105), 12, wanting, grammar=grammar, **given)])[0]
    if tokens == "other":
        assert not given["stop_token_ids"] & set(got[:2])
    else:
        assert got == tokens
    rig.engine.close()


def test_scored_prompts_keep_few_logits_at_a_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results do not depend on the number of logits kept at once."""
    prompt = tuple(3 + (index * 7) % 200 for index in range(150))
    request = TokenRequest("scored", prompt, 1, GREEDY, logprobs=2, prompt_logprobs=2)
    whole = Rig(checkpoint).run([request])[0][0].prompt_logprobs
    monkeypatch.setattr(f"{SAMPLING}.PROMPT_LOGITS", 16 * 4 * 261)
    rig = Rig(checkpoint)
    rows: list[int] = []
    forward = rig.engine.model.forward

    def counted(batch: Any, wanted: Any) -> Any:
        rows.append(len(wanted))
        return forward(batch, wanted)

    monkeypatch.setattr(rig.engine.model, "forward", counted)
    sliced = rig.run([request])[0][0].prompt_logprobs
    assert max(rows) == 16
    assert len(rows) >= 10
    assert whole is not None
    assert sliced is not None
    assert len(sliced) == len(whole) == 150
    for first, second in zip(whole[1:], sliced[1:], strict=True):
        assert first is not None
        assert second is not None
        assert first[0].token == second[0].token
        assert first[0].logprob == pytest.approx(second[0].logprob, abs=1e-4)


async def test_a_grammar_is_sent_once_and_kept_by_its_bytes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TorchOptions(dtype="float32", threads=1, cache_bytes=8 << 20, native=False, grammar_seconds=30)
    backend = await TorchBackend.load(checkpoint, options)
    sent: list[Any] = []

    def watch() -> None:
        worker: Any = backend._worker
        send = worker.send

        def recorded(message: Any) -> None:
            sent.append(message)
            send(message)

        worker.send = recorded

    async def text(name: str, grammar: Grammar) -> list[int | None]:
        request = TokenRequest(
            name, (72,), 20, Sampling(temperature=0.0), grammar=grammar, stop_token_ids=END
        )
        return [event.token async for event in backend.submit(request)]

    try:
        watch()
        answers = await asyncio.gather(*(text(f"a{n}", DIGITS) for n in range(32)))
        assert all(len(answer) == 7 and answer[-1] == 257 for answer in answers)
        learnt = [message for message in sent if isinstance(message, Learn)]
        assert len(learnt) == 1
        others = [len(encode(message)) for message in sent if not isinstance(message, Learn)]
        assert max(others) < 2048
        # With no room, each grammar that comes drops another; a grammar that comes again is sent again.
        monkeypatch.setattr(backend, "_learnt", BoundedCache(1))
        sent.clear()
        other = Grammar("regex", "[a-f]{4}")
        for number, grammar in enumerate((DIGITS, other, DIGITS)):
            assert (await text(f"b{number}", grammar))[-1] == 257
        assert len([message for message in sent if isinstance(message, Learn)]) == 3
        assert len([message for message in sent if isinstance(message, Forget)]) == 2
    finally:
        await backend.close()
    assert client.LEARNT_BYTES <= 1 << 30


async def test_the_compiler_runs_before_it_is_asked_for(checkpoint: Path) -> None:
    options = TorchOptions(dtype="float32", threads=1, cache_bytes=8 << 20, native=False)
    backend = await TorchBackend.load(checkpoint, options)
    try:
        async with asyncio.timeout(60):
            while not descendants_that_run(psutil.Process(), "grammars.child"):
                await asyncio.sleep(0.05)
    finally:
        await backend.close()
    assert not descendants_that_run(psutil.Process(), "grammars.child")


def test_what_is_kept_is_bounded_by_bytes() -> None:
    kept: BoundedCache[str, int] = BoundedCache(100)
    assert kept.put("a", 1, 40) == []
    assert kept.put("b", 2, 40) == []
    assert kept.get("a") == 1  # `a` was used, so `b` is dropped first
    assert kept.put("c", 3, 50) == ["b"]
    assert kept.put("d", 4, 1000) == ["a", "c"]
    assert (len(kept), kept.bytes, kept.get("d")) == (1, 1000, 4)
    assert kept.put("e", 5, 1) == ["d"]
    assert kept.bytes == 1
