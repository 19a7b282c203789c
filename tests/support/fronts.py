"""Opens fronts of a scripted cloud, and clients of these fronts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from nearfar.fallback_server.engines.upstream import UpstreamEngine, UpstreamOptions
from nearfar.fallback_server.http.app import AppOptions
from tests.support.clouds import Cloud
from tests.support.servers import RunningServer

Fronts = Callable[..., tuple[RunningServer, httpx.Client]]


@contextmanager
def opened_fronts() -> Iterator[Fronts]:
    """Give a function that makes a front of a cloud and a client of it; all are closed at the end.

    Further arguments of the function are those of UpstreamOptions.
    """
    with ExitStack() as opened:

        def make(
            cloud: Cloud,
            names: tuple[str, ...] = (),
            app: AppOptions | None = None,
            others: Sequence[Cloud] = (),
            **more: Any,
        ) -> tuple[RunningServer, httpx.Client]:
            options = UpstreamOptions(**{"key": "inner", "probe_seconds": 60, **more})
            addresses = [each.address for each in (cloud, *others)]
            server = RunningServer(lambda: UpstreamEngine.connect(addresses, options, names), app)
            opened.callback(server.close)
            client = httpx.Client(base_url=server.address, timeout=60)
            opened.callback(client.close)
            return server, client

        yield make
