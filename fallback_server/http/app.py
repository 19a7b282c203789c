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
from nearfar.fallback_server.http.calls import Call, Service, tenant_of
from nearfar.fallback_server.http.counts import Counts
from nearfar.fallback_server.http.embedding import EmbeddingShape, embedding
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.ignoring import HEADER, Ignored, Teller, UnknownFields, ignored, passes_on
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.limits import Admission, ServerLimits
from nearfar.fallback_server.http.logs import AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.middleware import (
    Authentication,
    Door,
    Heads,
    Hosts,
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
"""An engine that takes longer to say that it is ready is not."""


@dataclass(frozen=True)
class AppOptions:
    """What an app needs beside its engine. `hosts`: the names that it answers for; none: all. `counts`:
    its own, if not shared. `unknown_fields`: of requests.
    """

    limits: ServerLimits = field(default_factory=ServerLimits)
    keys: KeyStore | None = None
    audit: AuditLog | None = None
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    tracer: Tracer = field(default_factory=Tracer)
    counts: Counts | None = None
    unknown_fields: UnknownFields = "refuse"


class JsonRoute(APIRoute):
    """A route whose body is read as strict JSON. `teller`: logs what was ignored; None: nothing is.
    `passes_on`: what is unknown here is for the engine's servers.
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
    """The app over an engine. It does not close the engine."""
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
            # Clients add headers of their own (the openai package nine), and none changes what is allowed.
            allow_headers=["*"],
            # An origin that is named may call this machine from a public page, too.
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after", HEADER],
        )
    if options.hosts:
        app.add_middleware(Hosts, allowed=options.hosts)
    app.add_middleware(RequestIds)
    app.add_middleware(Targets)
    return app


def _api(service: Service, options: AppOptions) -> APIRouter:
    """OpenAI's endpoints."""
    teller = Teller() if options.unknown_fields == "ignore" else None
    settings = {
        "max_depth": options.limits.json_depth, "teller": teller, "passes_on": service.engine.passes_on,
    }  # fmt: skip
    passes_all = service.engine.passes_on and teller is None
    route = type("LimitedJsonRoute", (JsonRoute,), settings)
    api = APIRouter(prefix="/v1", route_class=route)
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
        """Vectors of texts."""
        return await _embed(service, request, body, passes_all)

    @api.get("/models", response_model=None)
    async def models(request: Request) -> dict[str, Any]:
        """What can be asked for."""
        data = [_model(info, started, request) for info in _visible(service, request)]
        return {"object": "list", "data": data}

    @api.get("/models/{name:path}", response_model=None)
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Describe one of the models that the server lists."""
        found = next((info for info in _visible(service, request) if info.id == name), None)
        if found is None:
            raise ApiError(404, f"there is no model {name!r:.100}", "model", "model_not_found")
        return _model(found, started, request)

    return api


def _probes(service: Service, keys: KeyStore | None) -> APIRouter:
    """What balancers and Prometheus ask. Where there are keys, only an admin's is told addresses."""
    router = APIRouter()

    @router.get("/health", response_model=None)
    async def health() -> dict[str, Any]:
        """The server is alive."""
        return {"status": "ok"}

    @router.get("/ready", response_model=None)
    async def ready(request: Request) -> Response:
        """The engine has computed lately, or generates a token now."""
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
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _complete(
    service: Service, request: Request, body: ChatRequest | CompletionRequest, passes_all: bool
) -> Response:
    """`passes_all`: an upstream gets the body as it came."""
    asked = convert.chat(body) if isinstance(body, ChatRequest) else convert.completion(body)
    tenant = tenant_of(request)
    priority = max(0, tenant.priority) if body.priority is None else body.priority
    if passes_all and isinstance(request, convert.JsonRequest):
        asked = replace(asked, body=convert.as_it_came(request.read, body))
    wanted = replace(asked, tenant=tenant.within(body.cache_salt), priority=priority)
    options = body.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    include_usage = continuous or bool(options and options.include_usage)
    head = Head(wanted.id, wanted.model, include_usage, continuous)
    shape = ChatShape(head) if wanted.chat else CompletionShape(head)
    return await Call(service, request, wanted).respond(shape, bool(body.stream), include_usage)


async def _embed(service: Service, request: Request, body: EmbeddingRequest, passes_all: bool) -> Response:
    tenant = tenant_of(request)
    wanted = replace(embedding(body), tenant=tenant, priority=max(0, tenant.priority))
    if passes_all and isinstance(request, convert.JsonRequest):
        wanted = replace(wanted, body=convert.as_it_came(request.read, body))
    coded, passed = body.encoding_format == "base64", service.engine.passes_on
    shape = EmbeddingShape(body.model, coded, body.dimensions, normalize=not passed)
    return await Call(service, request, wanted).embed(shape)


def _visible(service: Service, request: Request) -> list[Any]:
    tenant = tenant_of(request)
    return [info for info in service.engine.models() if tenant.allows(info.id)]


def _model(info: Any, started: int, request: Request) -> dict[str, Any]:
    made: dict[str, Any] = {"id": info.id, "object": "model", "created": started, "owned_by": "nearfar"}
    if info.here:  # the routing client gives private requests to no other server
        made["x_nearfar"] = {"computes": "here", **_proof(request)}
    return {**made, "max_model_len": info.context_length} if info.context_length else made


def _proof(request: Request) -> dict[str, str]:
    """Proof for a request with a nonce that this server runs on its machine, as its user."""
    _, port = request.scope.get("server") or ("", None)
    nonce = request.headers.get(NONCE_HEADER)
    made = proof(nonce, port) if nonce and port else None
    return {"proof": made} if made else {}
