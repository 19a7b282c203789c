"""The FastAPI app: endpoints over one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from nearfar.fallback_server.engines.base import Engine
from nearfar.fallback_server.http import admin, convert, errors
from nearfar.fallback_server.http.answering import Completion
from nearfar.fallback_server.http.apis import messages_routes, ollama_routes, responses_routes, tokens_routes
from nearfar.fallback_server.http.apis.asking import asked, asked_vectors
from nearfar.fallback_server.http.apis.kept import KeptResponses
from nearfar.fallback_server.http.calls import Call, Service, tenant_of
from nearfar.fallback_server.http.counts import Counts
from nearfar.fallback_server.http.embedding import EmbeddingShape
from nearfar.fallback_server.http.ignoring import HEADER, Ignored, Teller, ignored, passes_on
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.middleware import (
    Authentication,
    Door,
    Heads,
    Hosts,
    Paths,
    RequestIds,
    Sizes,
    Targets,
)
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, Head
from nearfar.fallback_server.http.tracing import Tracer
from nearfar.machine import NONCE_HEADER, proof
from nearfar.version import __version__

READY_SECONDS = 7.0
"""Seconds that an engine may take to report that it is ready; a slower one counts as not ready."""


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


class JsonRoute(APIRoute):
    """A route whose body is read as strict JSON. `teller` logs ignored fields; None rejects unknown fields.
    `passes_on`: unknown fields are for the engine's servers.
    """

    max_depth = ServerLimits.json_depth
    teller: Teller | None = None
    passes_on = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See APIRoute."""
        handle = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None

        async def strict(request: Request) -> Response:
            made = convert.JsonRequest(request.scope, request.receive)
            made.max_depth, made.model = self.max_depth, model
            passing = passes_on.set(self.passes_on)
            try:
                return await told(made)
            finally:
                passes_on.reset(passing)

        async def told(made: convert.JsonRequest) -> Response:
            if self.teller is None:
                return await handle(made)
            found = Ignored()
            token = ignored.set(found)
            try:
                response = await handle(made)
            finally:
                ignored.reset(token)
            if found.names:
                response.headers[HEADER] = found.header
                self.teller.tell(found, made.headers.get("user-agent", ""))
            return response

        return strict


def create_app(engine: Engine, options: AppOptions | None = None) -> FastAPI:
    """Make the app over an engine. The app does not close the engine."""
    options = options or AppOptions()
    metrics = Metrics(lambda: [info.id for info in engine.models()], engine.stats)
    service = Service(
        engine, Admission(options.limits, options.counts), metrics, options.tracer, options.audit
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if options.audit is not None:
            options.audit.close()

    app = FastAPI(title="nearfar", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    errors.install(app)
    app.include_router(_api(service, options))
    app.include_router(_ollama(service, options))
    app.include_router(_probes(service, options.keys))
    app.include_router(admin.router(service, options.keys))
    app.add_middleware(Heads)
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
            expose_headers=["x-request-id", "retry-after", HEADER],
        )
    if options.hosts:
        app.add_middleware(Hosts, allowed=options.hosts)
    app.add_middleware(Paths, paths=errors.PATHS)
    app.add_middleware(RequestIds)
    app.add_middleware(Targets)
    return app


def _router(prefix: str, service: Service, options: AppOptions) -> APIRouter:
    """Make a router that reads requests within the limits, and ignores unknown fields unless they are
    rejected or passed on.
    """
    teller = None if options.strict_fields or service.engine.passes_on else Teller()
    settings = {
        "max_depth": options.limits.json_depth, "teller": teller, "passes_on": service.engine.passes_on,
    }  # fmt: skip
    return APIRouter(prefix=prefix, route_class=type("LimitedJsonRoute", (JsonRoute,), settings))


def _ollama(service: Service, options: AppOptions) -> APIRouter:
    """Ollama's endpoints."""
    api = _router("/api", service, options)
    ollama_routes.add(api, service)
    return api


def _api(service: Service, options: AppOptions) -> APIRouter:
    """OpenAI's endpoints and Anthropic's."""
    api, passes_all = _router("/v1", service, options), service.engine.passes_on
    started = int(time.time())

    @api.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _complete(service, request, body, passes_all)

    @api.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several texts."""
        return await _complete(service, request, body, passes_all)

    @api.post("/embeddings", response_model=None)
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Return the vectors of texts."""
        return await _embed(service, request, body, passes_all)

    responses_routes.add(api, service, KeptResponses() if options.store else None)

    messages_routes.add(api, service)
    tokens_routes.add(api, service)

    @api.get("/models", response_model=None)
    async def models(request: Request) -> dict[str, Any]:
        """List the models that the key may use."""
        data = [_model(info, started, request) for info in service.visible(tenant_of(request))]
        return {"object": "list", "data": data}

    @api.get("/models/{name:path}", response_model=None)
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Describe one of the models that the server lists."""
        return _model(service.model(name, tenant_of(request)), started, request)

    return api


def _probes(service: Service, keys: KeyStore | None) -> APIRouter:
    """Make the routes for load balancers and Prometheus. On a server with keys, only an admin's key gets
    addresses.
    """
    router = APIRouter()

    @router.get("/", response_model=None)
    async def root() -> dict[str, Any]:
        """Answer that a server is here: clients check this first."""
        return {"status": "ok", "server": "nearfar"}

    @router.get("/health", response_model=None)
    async def health() -> dict[str, Any]:
        """Answer that the server is alive."""
        return {"status": "ok"}

    @router.get("/ready", response_model=None)
    async def ready(request: Request) -> Response:
        """Answer whether the engine has computed lately, or generates a token now."""
        if service.draining:
            return JSONResponse({"status": "draining"}, 503)
        try:
            async with asyncio.timeout(READY_SECONDS):
                alive = await service.engine.ready()
        except TimeoutError:
            alive = False
        if alive:
            return JSONResponse({"status": "ready"})
        why = service.engine.unready()
        admin = keys is None or keys.opens_admin(request.headers.get("authorization", ""))
        hidden = "; the server's log says which and why, and so does /ready with an admin key"
        details = f": {why.details}" if admin else hidden
        return JSONResponse({"status": why.said + (details if why.details else "")}, 503)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _complete(
    service: Service, request: Request, body: ChatRequest | CompletionRequest, passes_all: bool
) -> Response:
    """Answer a completion. `passes_all`: the engine gets the body as received."""
    wanted = asked(service, request, body)
    if passes_all and isinstance(request, convert.JsonRequest):
        came = convert.as_it_came(request.read, body)
        wanted = replace(wanted, body=came, passed=bool(body.stream))
    options = body.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    include_usage = continuous or bool(options and options.include_usage)
    head = Head(wanted.id, wanted.model, include_usage, continuous)
    kind = ChatShape if wanted.chat else CompletionShape
    shape = Completion(kind(head, wanted.choices), head)
    return await Call(service, request, wanted).respond(shape, bool(body.stream))


async def _embed(service: Service, request: Request, body: EmbeddingRequest, passes_all: bool) -> Response:
    wanted = asked_vectors(service, request, body)
    if passes_all and isinstance(request, convert.JsonRequest):
        wanted = replace(wanted, body=convert.as_it_came(request.read, body))
    coded, passed = body.encoding_format == "base64", service.engine.passes_on
    shape = EmbeddingShape(wanted.model, coded, body.dimensions, normalize=not passed)
    return await Call(service, request, wanted).embed(shape)


def _model(info: Any, started: int, request: Request) -> dict[str, Any]:
    made: dict[str, Any] = {"id": info.id, "object": "model", "created": started, "owned_by": "nearfar"}
    if info.here:  # the routing client gives private requests to no other server
        made["x_nearfar"] = {"computes": "here", **_proof(request)}
    return {**made, "max_model_len": info.context_length} if info.context_length else made


def _proof(request: Request) -> dict[str, str]:
    """Return the proof, for a request with a nonce, that this server runs on the client's machine as the
    client's user.
    """
    _, port = request.scope.get("server") or ("", None)
    nonce = request.headers.get(NONCE_HEADER)
    made = proof(nonce, port) if nonce and port else None
    return {"proof": made} if made else {}
