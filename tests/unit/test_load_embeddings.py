"""One client's embeddings beside other requests: they share one queue, and end with their call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.errors import OverloadError
from nearfar.fallback_server.backend import EmbedRequest, TokenRequest
from nearfar.fallback_server.engines.artifact import ArtifactBackend
from nearfar.fallback_server.engines.base import EmbeddingVectors, EngineRequest
from nearfar.fallback_server.engines.local import LocalEngine, TextOptions, TextSource
from nearfar.fallback_server.tenants import Tenant
from nearfar.fallback_server.torch_engine.messages import Cancel, Embedded, EmbedSequence
from tests.shared_data import shared_data
from tests.support.servers import MODEL, tiny_core, tokenizer_directory
from tests.support.torch_rig import GREEDY, Rig

HEAVY, LIGHT = Tenant("heavy", salt="h"), Tenant("light", salt="l")
STEPS_BESIDE = 3
"""The most steps of a short request beside an attack, as a multiple of its steps alone."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    core = tiny_core(slots=4)
    core.manifest = replace(core.manifest, model=replace(core.manifest.model, task="embed"))
    core._builder._model = core.manifest.model
    # the vector has as many values as there are logits
    core.executor.buffers["embedding"] = core.executor.buffers["logits"]
    backend = ArtifactBackend(core, max_waiting=8)
    made = LocalEngine(
        backend,
        TextSource(tokenizer_directory(tmp_path), None),
        TextOptions(template_timeout=20, text_processes=1),
    )
    yield made
    await made.close()


def core_of(engine: LocalEngine) -> EngineCore:
    assert isinstance(engine.backend, ArtifactBackend)
    return engine.backend.core


async def embed(
    engine: LocalEngine, tenant: Tenant, *prompts: tuple[int, ...], name: str = "e"
) -> EmbeddingVectors:
    request = EngineRequest(name, MODEL, prompts=prompts, max_tokens=0, pooling="model", tenant=tenant)
    return await engine.embed(await engine.prepare(request))


def long(first: int) -> tuple[int, ...]:
    return (first, *(n % 200 for n in range(149)))


async def test_a_word_beside_a_list_of_texts_and_after_it_was_hung_up(engine: LocalEngine) -> None:
    core = core_of(engine)
    await embed(engine, LIGHT, (7,))
    alone = core.steps
    attack = asyncio.create_task(embed(engine, HEAVY, *map(long, range(80)), name="attack"))
    while core.steps < alone + 2:
        await asyncio.sleep(0)
    before = core.steps
    await embed(engine, LIGHT, (8,))
    # Requests that run when the new one comes are read first: four of 150 rows in steps of 256.
    assert core.steps - before <= STEPS_BESIDE * alone + 2
    assert not attack.done()
    attack.cancel()
    await asyncio.wait([attack])
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert not core.scheduler.running
    assert not core.scheduler.waiting


async def test_no_tenant_finds_the_texts_of_another(engine: LocalEngine) -> None:
    core, sizes = core_of(engine), []
    for tenant in (HEAVY, HEAVY, LIGHT):
        done = len(core.executor.steps)
        await embed(engine, tenant, long(1))
        sizes.append(sum(core.executor.steps[done:]))
    assert sizes[1] < sizes[0] == sizes[2]


async def test_embeddings_fill_the_line_no_further_than_other_requests(engine: LocalEngine) -> None:
    calls = [asyncio.create_task(embed(engine, HEAVY, *map(long, range(50)), name=str(n))) for n in range(4)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    assert any(isinstance(call.exception(), OverloadError) for call in done)
    assert engine.stats().waiting <= 8
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_the_torch_engine_embeds_in_steps_and_forgets_what_nobody_wants() -> None:
    """Before the fix each text took a whole turn, even if nobody waited for it."""
    pytest.importorskip("transformers", reason="the torch engine is not here")
    rig = Rig(shared_data("models", "stories260K"), token_budget=64, max_running=16)
    engine, text = rig.engine, tuple(range(3, 63))

    def turns_until(name: str) -> int:
        for count in range(1, 200):
            engine.turn()
            if any(isinstance(said, Embedded) and said.id == name for said in rig.said):
                return count
        raise AssertionError(name)

    engine.handle(EmbedSequence(EmbedRequest("alone", (5,))))
    alone = turns_until("alone")
    for number in range(60):
        engine.handle(EmbedSequence(EmbedRequest(f"many{number}", text, late=float(number))))
    engine.turn()
    rig.submit(TokenRequest("chat", (5, 6), 3, GREEDY))
    engine.turn()
    engine.turn()
    assert len(rig.events("chat")) >= 1
    for number in range(60):
        engine.handle(Cancel(f"many{number}"))
    engine.handle(EmbedSequence(EmbedRequest("word", (5,))))
    assert turns_until("word") <= STEPS_BESIDE * alone
    rig.run([])
    rig.assert_empty()


def test_the_torch_engine_pools_over_chunks_as_over_the_whole_text() -> None:
    pytest.importorskip("transformers", reason="the torch engine is not here")
    text = tuple(range(3, 63))
    made = {}
    for budget in (64, 17):
        rig = Rig(shared_data("models", "stories260K"), token_budget=budget, max_running=16)
        for pooling in ("mean", "last"):
            rig.engine.handle(EmbedSequence(EmbedRequest(pooling, text, pooling)))
        rig.run([])
        made[budget] = {said.id: said.values for said in rig.said if isinstance(said, Embedded)}
    for pooling in ("mean", "last"):
        assert made[17][pooling] == pytest.approx(made[64][pooling], abs=1e-5)
