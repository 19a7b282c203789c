"""`nearfar serve`: opens an engine, builds the app over it, and runs the process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp

from nearfar.edge_runtime.progress import Progress, Tell
from nearfar.errors import NearfarError, RequestError
from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.engines.opening import (
    EngineKind,
    EngineOptions,
    is_url,
    kind_of,
    open_engine,
)
from nearfar.fallback_server.http.app import AppOptions, create_app
from nearfar.fallback_server.http.connections import protocol
from nearfar.fallback_server.http.counts import OwnCounts
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import ServerLimits
from nearfar.fallback_server.http.logs import AuditLog, set_up
from nearfar.fallback_server.http.opening import OpeningApp
from nearfar.fallback_server.http.prices import Price
from nearfar.fallback_server.http.service import Service
from nearfar.fallback_server.http.shared_counts import SharedCounts, open_store
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.fallback_server.ray_engine.cluster import open_on_ray
from nearfar.fallback_server.ray_engine.options import RayOptions
from nearfar.hosts import answered_hosts, check_origin, is_local
from nearfar.interruptible import CTRL_C
from nearfar.remote.server import root_of

log = logging.getLogger(__name__)

LOOK = 0.01
"""Seconds between two checks while waiting for the start or the drain."""
GRACE = 2.0
"""Seconds after the drain for streams to send their last event."""
WELCOMED = 8
"""Most names of models in the line that says that the server is ready."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end the server."""


@dataclass(frozen=True)
class ServeOptions:
    """How the server runs; the command line takes its defaults from here."""

    engine: EngineKind = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    no_auth: bool = False
    drain: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    audit: Path | None = None
    audit_text: bool = False
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    limits: ServerLimits = field(default_factory=ServerLimits)
    strict_fields: bool = AppOptions.strict_fields
    store: bool = AppOptions.store
    prices: Mapping[str, Price] = field(default_factory=dict)
    limits_store: str | None = field(default=None, repr=False)  # the address may contain a password
    engines: EngineOptions = field(default_factory=EngineOptions)
    ray: RayOptions | None = None


class DrainingServer(uvicorn.Server):
    """Takes no new requests after SIGTERM, finishes those under way within `drain` seconds, then stops the
    engine.

    Requests that remain then get an error event, not a cut connection.
    """

    def __init__(
        self, config: uvicorn.Config, drain: float, keys: KeyStore | None, waits: str = "loading the model"
    ) -> None:
        """`waits`: what the server does before it is ready, for the log."""
        super().__init__(config)
        self._waits = waits
        self._service: Service | None = None
        self._drain, self._keys = drain, keys
        self.ended_by: int | None = None
        """The signal that ended the server before there was an engine."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen (see uvicorn), then log the address. Raises NearfarError where that fails."""
        reason = ""

        def keep(record: logging.LogRecord) -> bool:
            """Drop the line that uvicorn logs before it exits, and keep its reason for our own message."""
            nonlocal reason
            if not isinstance(record.msg, OSError):
                return True
            # asyncio's message names the address before the reason
            reason = str(record.msg).rpartition(": ")[2]
            return False

        told = logging.getLogger("uvicorn.error")
        told.addFilter(keep)
        try:
            await super().startup(sockets)
        except SystemExit as error:  # uvicorn ends in this way
            at = f"{self.config.host}:{self.config.port}"
            raise NearfarError(
                f"the server cannot listen at {at}, {reason}: is another one there? --port takes another, "
                "0 a free one"
            ) from error
        finally:
            told.removeFilter(keep)
        if self.started:
            log.info("listening at %s; %s …", self._url(), self._waits)

    def ready(self, service: Service) -> None:
        """Take the loaded engine: requests are answered from now on, and the engine is drained at the end."""
        self._service = service
        if threading.current_thread() is threading.main_thread():
            for (
                number
                # Ray's native handlers, which it sets when it starts, print a stack and set an alarm
            ) in ENDING:
                signal.signal(number, self.handle_exit)
        if not self.should_exit:
            print(_welcome(self._url(), service.engine, self._keys is not None), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the service, then shut down. See uvicorn."""
        service = self._service
        if service is None or self.ended_by is not None:
            await super().shutdown(sockets)
            return
        service.draining = True
        log.info("draining %d requests, at most %g s", service.admission.requests, self._drain)
        until = time.monotonic() + self._drain
        with suppress(NearfarError):
            await self._drained(service, until)
        left = max(until - time.monotonic(), 0.0)
        self.config.timeout_graceful_shutdown = int(left + GRACE + 0.999)
        await super().shutdown(sockets)

    async def _drained(self, service: Service, until: float) -> None:
        """Stop the engine when nothing is under way, or at once at a second Ctrl-C. The server still listens:
        new requests and a balancer's /ready are told that it drains.
        """
        closing = asyncio.create_task(service.engine.close(self._drain))
        while not closing.done() and not self.force_exit:
            await asyncio.sleep(LOOK)
        if closing.done():
            await closing
        else:
            closing.cancel()
            await asyncio.wait((closing,))
            await service.engine.close()
        while service.admission.requests and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(LOOK)  # slow readers still get their answers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal (see uvicorn). Cancels the alarm of Ray's native handler, which aborts the process
        after 3 s (Abseil's `alarm_on_failure_secs`), drained or not.
        """
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        if self._service is None:
            self.ended_by = sig
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals like uvicorn, without raising them again at the end: a drained server has ended
        well.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in ENDING}
        if self._keys is not None and hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: self._reload_keys())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _reload_keys(self) -> None:
        assert self._keys is not None
        try:
            self._keys.reload()
        except RequestError as error:
            log.error("the keys stay as they were: %s", error)

    def _url(self) -> str:
        config = self.config
        port = (
            self.servers[0].sockets[0].getsockname()[1]
            if self.servers and self.servers[0].sockets
            else config.port
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"{'https' if config.is_ssl else 'http'}://{host}:{port}"


def serve(models: tuple[str, ...], options: ServeOptions, tell: Tell | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. `tell` receives what the server waits for before it is ready."""
    keys = check_access(options)
    if options.ray is None:
        kind_of(models, options.engine, options.engines)
    elif len(models) != 1:
        raise RequestError(f"--ray runs replicas of one model, not of {len(models)}")
    set_up(options.log_format, options.log_level)
    front = is_front(models, options)
    for address in models if front else ():
        root_of(address)
    with asyncio.Runner(loop_factory=_fast_loop() if front else None) as runner:
        runner.run(_main(models, options, keys, tell))


def is_front(models: tuple[str, ...], options: ServeOptions) -> bool:
    """Whether the server stands in front of other servers."""
    return options.ray is None and options.engine in ("auto", "upstream") and is_url(models)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the maker of uvloop's event loop where it is installed: a front's time goes into sockets."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def check_access(options: ServeOptions) -> KeyStore | None:
    """Open the keys. Raises RequestError for a server that would be open to a network without keys by
    mistake.
    """
    keys = KeyStore(options.keys) if options.keys is not None else None
    if keys is None and not options.no_auth and not is_local(options.host):
        raise RequestError(
            f"{options.host} can be reached from other machines: give --keys FILE (`nearfar keys FILE NAME` "
            "makes one), or --no-auth if everybody who reaches it may use it",
            "host",
        )
    if keys is None and options.limits_store is not None:
        raise RequestError("--limits-store counts for keys: give --keys FILE", "limits_store")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise RequestError("--tls-cert and --tls-key belong together", "tls_cert")
    for origin in options.cors:
        check_origin(origin)
    return keys


async def _main(
    models: tuple[str, ...], options: ServeOptions, keys: KeyStore | None, tell: Tell | None
) -> None:
    counts = None
    if options.limits_store is not None:
        counts = await open_store(options.limits_store, OwnCounts(options.limits.fronts))
    try:
        ended_by = await _run(models, options, keys, counts, tell)
    finally:
        if counts is not None:
            await counts.close()
    if ended_by is not None and options.ray is None:  # Ray still has processes to end
        _leave(CTRL_C if ended_by == signal.SIGINT else 0)


def _leave(status: int) -> None:
    """End the process at once: asyncio.run would wait for the loading thread, which nothing can stop."""
    print("stopped", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


async def _run(
    models: tuple[str, ...],
    options: ServeOptions,
    keys: KeyStore | None,
    counts: SharedCounts | None,
    tell: Tell | None,
) -> int | None:
    """Listen, then load: requests that come meanwhile are told the progress. Returns the signal that ended
    the server before the model was loaded, or None.
    """
    hosts = answered_hosts(options.host, options.hosts)
    opening = OpeningApp(hosts, tell)
    waits = (
        "asking the upstream servers for their models" if is_front(models, options) else "loading the model"
    )
    server = DrainingServer(_configured(opening, options), options.drain, keys, waits)
    serving = asyncio.create_task(server.serve())
    engine = None
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(LOOK)
        if server.started:
            engine = await _unless(serving, _open(models, options, opening.tell))
        if engine is None or server.ended_by is not None:
            return server.ended_by
        audit = AuditLog(options.audit, options.audit_text) if options.audit is not None else None
        made = AppOptions(
            options.limits,
            keys,
            audit,
            options.cors,
            hosts,
            Tracer.from_environment(),
            counts,
            options.strict_fields,
            options.store,
            options.prices,
        )
        app = create_app(engine, made)
        async with app.router.lifespan_context(app):
            opening.tell(Progress("ready"))
            opening.app = app
            server.ready(app.state.service)
            await serving
        return server.ended_by
    finally:
        opening.tell(Progress("ready"))
        server.should_exit = True
        await serving
        if engine is not None and (server.ended_by is None or options.ray is not None):
            await engine.close()


async def _unless(
    over: asyncio.Task[None], loading: Coroutine[Any, Any, ServerEngine]
) -> ServerEngine | None:
    """Return the engine, or None if the server is told to end before it is loaded."""
    opened = asyncio.create_task(loading)
    try:
        await asyncio.wait([over, opened], return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            return opened.result()
        return None
    finally:
        if not opened.done():
            opened.cancel()
            await asyncio.wait([opened])


def _configured(app: ASGIApp, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        http=protocol(options.limits),
        loop="asyncio",
        lifespan="off",  # the app begins its own lifespan once it exists
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(options.drain + GRACE + 0.999),
        h11_max_incomplete_event_size=options.limits.header_bytes,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ssl_ca_certs=str(options.tls_client_ca) if options.tls_client_ca else None,
        ssl_cert_reqs=2 if options.tls_client_ca else 0,
    )


async def _open(models: tuple[str, ...], options: ServeOptions, tell: Tell) -> ServerEngine:
    if options.ray is None:
        return await open_engine(models, options.engine, options.engines, tell)
    return await open_on_ray(models[0], options.engine, options.engines, options.ray)


def _welcome(url: str, engine: ServerEngine, keyed: bool) -> str:
    names = [info.id for info in engine.models()]
    model = next(iter(names), "MODEL")
    rest = f" and {len(names) - WELCOMED} more (/v1/models)" if len(names) > WELCOMED else ""
    said = f"nearfar serves {', '.join(names[:WELCOMED])}{rest} at {url}"
    if not names:
        said = f"nearfar answers at {url} as soon as an upstream server lists a model"
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"{said}  (Ctrl-C ends)\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
