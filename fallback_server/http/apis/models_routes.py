"""The routes that list and describe models, in OpenAI's shape."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from nearfar.fallback_server.engines.base import ModelInfo
from nearfar.fallback_server.http.apis.asking import Record
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.machine import NONCE_HEADER, proof


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /v1."""
    started = int(time.time())

    @api.get("/models", response_model=None)
    async def models(request: Request) -> Record:
        """List the models that the key may use."""
        data = [_model(info, started, request) for info in service.visible(tenant_of(request))]
        return {"object": "list", "data": data}

    @api.get("/models/{name:path}", response_model=None)
    async def model(name: str, request: Request) -> Record:
        """Describe one of the models that the server lists."""
        return _model(service.model(name, tenant_of(request)), started, request)


def _model(info: ModelInfo, started: int, request: Request) -> Record:
    made: Record = {"id": info.id, "object": "model", "created": started, "owned_by": "nearfar"}
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
