"""Hostile requests beside eight healthy streams, which must finish with the right tokens, over every
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.hostile import ENGINES, HOSTILE, Rig, attack, healthy, open_rig


@pytest.fixture(scope="module", params=ENGINES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if request.param == "torch":
        pytest.importorskip("transformers", reason="the torch engine is not here")
    made = open_rig(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


async def test_hostile_requests_beside_healthy_streams(rig: Rig) -> None:
    """Each gets its own status, all at once, several rounds of healthy streams long."""
    async with healthy(rig) as http:
        wrong = await asyncio.gather(*(attack(http, name) for name in HOSTILE))
    assert [what for what in wrong if what] == []
