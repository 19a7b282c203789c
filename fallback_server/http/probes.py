"""The routes for load balancers and Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from nearfar.fallback_server.http.errors import DESCRIBED
from nearfar.fallback_server.http.keys import KeyStore
from nearfar.fallback_server.http.service import Service
from nearfar.version import __version__

READY_SECONDS = 7.0
"""Seconds that an engine may take to report that it is ready; a slower one counts as not ready."""


def router(service: Service, keys: KeyStore | None) -> APIRouter:
    """Make the router. On a server with keys, only an admin's key gets addresses."""
    api = APIRouter(responses=DESCRIBED)

    @api.get("/", response_model=None)
    async def root() -> dict[str, Any]:
        """Answer that a server is here: clients check this first."""
        return {"status": "ok", "server": "nearfar"}

    @api.get("/health", response_model=None)
    async def health() -> dict[str, Any]:
        """Answer that the server is alive."""
        return {"status": "ok"}

    @api.get("/ready", response_model=None)
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

    @api.get("/version", response_model=None)
    async def version() -> dict[str, str]:
        """Return the server's version, in vLLM's shape."""
        return {"version": __version__}

    @api.get("/load", response_model=None)
    async def load() -> dict[str, int]:
        """Return how many requests this process has under way, in vLLM's shape."""
        return {"server_load": service.admission.requests}

    @api.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
