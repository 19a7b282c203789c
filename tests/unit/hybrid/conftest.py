"""The rig of the hybrid client's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from nearfar.edge_runtime import AsyncEngine
from tests.support.hybrid import (
    Rig,
    edge,
)
from tests.support.proxy import Proxy
from tests.support.servers import RunningServer, tiny_engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("tokenizer")
    made = RunningServer(lambda: tiny_engine(path))
    yield made
    made.close()


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture
async def device() -> AsyncIterator[AsyncEngine]:
    async with edge() as engine:
        yield engine


@pytest.fixture
async def rig(device: AsyncEngine, proxy: Proxy) -> AsyncIterator[Rig]:
    made = Rig(device, proxy)
    yield made
    for client in made.made:
        await client.close()
