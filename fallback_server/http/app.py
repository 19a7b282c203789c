"""The FastAPI app: all routes over one engine, behind the middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from nearfar.edge_runtime.openai.responses.kept import KeptResponses
from nearfar.fallback_server.engines.base import ServerEngine
from nearfar.fallback_server.http import admin, errors, probes
from nearfar.fallback_server.http.apis import (
    chat_routes,
    completions_routes,
    decisions_routes,
    embeddings_routes,
    messages_routes,
    models_routes,
    ollama_routes,
    rerank_routes,
    responses_routes,
    tokens_routes,
)
from nearfar.fallback_server.http.counts import Counts
from nearfar.fallback_server.http.ignoring import HEADER
from nearfar.fallback_server.http.json_routes import json_router
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.middleware import (
    ID_HEADERS,
    Authentication,
    Door,
    HeadRequests,
    Hosts,
    Paths,
    RequestIds,
    Rests,
    Sizes,
    Targets,
)
from nearfar.fallback_server.http.passing import Forwarder, absent
from nearfar.fallback_server.http.paths import PATHS
from nearfar.fallback_server.http.prices import Price
from nearfar.fallback_server.http.service import Service
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.remote.server import ESTIMATED_HEADER, NATIVE
from nearfar.version import __version__


@dataclass(frozen=True)
class AppOptions:
    """Settings of an app. `hosts`: the host names that it answers for; none means all. `counts`: the counts
    of limits; by default the app's own. `strict_fields`: reject unknown fields of requests.
    """

    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: KeyStore | None = None
    audit: AuditLog | None = None
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    tracer: Tracer = field(default_factory=Tracer)
    counts: Counts | None = None
    strict_fields: bool = False
    store: bool = True
    """Whether responses are kept in memory, so that later requests can read and continue them by id."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Prices by model, for the metrics."""


def create_app(engine: ServerEngine, options: AppOptions | None = None) -> FastAPI:
    """Make the app over an engine. The app does not close the engine."""
    options = options or AppOptions()
    keys, source = options.keys, "upstream" if engine.passes_on else "prefix_cache"
    metrics = Metrics(
        lambda: [info.id for info in engine.models() if not info.stands_for],
        engine.stats, options.prices, source,
    )  # fmt: skip
    service = Service(
        engine, Admission(options.limits, options.counts), metrics, options.tracer, options.audit,
        names_keys=lambda: keys is None or keys.has_admin,
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if options.audit is not None:
            options.audit.close()

    app = FastAPI(
        title="nearfar",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    errors.install(app)
    for api in _apis(service, options):
        app.include_router(api)
    app.include_router(probes.router(service, options.keys))
    app.include_router(admin.router(service, options.keys))
    app.add_middleware(HeadRequests)
    app.add_middleware(Door, admission=service.admission, turned_away=service.turned_away)
    app.add_middleware(Authentication, keys=options.keys)
    app.add_middleware(Sizes, limits=options.limits)
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors),
            allow_methods=["GET", "HEAD", "POST"],
            # Clients add their own headers (the openai package nine), and none changes what is allowed.
            allow_headers=["*"],
            # A named origin may call this machine from a public page, too.
            allow_private_network=True,
            expose_headers=[*ID_HEADERS, "retry-after", HEADER, ESTIMATED_HEADER],
        )
    if options.hosts:
        app.add_middleware(Hosts, allowed=options.hosts)
    app.add_middleware(Paths, paths=(*PATHS, *(NATIVE if engine.passes_on else ())))
    app.add_middleware(Rests, limits=options.limits)
    app.add_middleware(RequestIds)
    app.add_middleware(Targets)
    return app


def _apis(service: Service, options: AppOptions) -> Iterator[APIRouter]:
    """Yield the routers of the APIs: OpenAI's and Anthropic's below /v1, Ollama's below /api."""
    front = service.engine.passes_on
    settings = (options.limits.json_depth, options.strict_fields, not front)
    passing = Forwarder(service) if front else None
    v1, api = json_router("/v1", *settings, passing=passing), json_router("/api", *settings)
    v2 = json_router("/v2", *settings, passing=passing)
    # An upstream gets the requests of these as received, and the others' as chat completions or forwarded.
    same = json_router("/v1", *settings, passes_on=front)
    rerank_routes.add(v1, service)
    rerank_routes.add(v2, service)
    chat_routes.add(same, service)
    completions_routes.add(same, service)
    embeddings_routes.add(same, service)
    decisions_routes.add(v1, service)
    responses_routes.add(v1, service, KeptResponses() if options.store else None)
    messages_routes.add(v1, service)
    tokens_routes.add(v1, service)
    models_routes.add(v1, service)
    ollama_routes.add(api, service)
    yield same
    yield v1
    yield v2
    yield api
    if passing is not None:
        others = json_router("", *settings, passing=passing)
        known = {getattr(route, "path", "") for route in (*v1.routes, *v2.routes)}
        for path in NATIVE:
            if path not in known:
                others.add_api_route(path, absent, methods=["POST"], response_model=None)
        yield others
