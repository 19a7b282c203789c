"""The routes that list and describe models, in OpenAI's shape, or in Anthropic's for its clients."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from fastapi import APIRouter, Request

from nearfar.fallback_server.engines.base import ModelInfo
from nearfar.fallback_server.http.apis.asking import Record
from nearfar.fallback_server.http.errors import speaks_anthropic
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.machine import NONCE_HEADER, proof


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /v1."""
    started = int(time.time())

    @api.get("/models", response_model=None)
    async def models(request: Request) -> Record:
        """List the models that the key may use."""
        data = [_model(info, started, request) for info in service.visible(tenant_of(request))]
        if not speaks_anthropic(request):
            return {"object": "list", "data": data}
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else dict.fromkeys(_ENDS)
        return {"data": data, "has_more": False, **ends}

    @api.get("/models/{name:path}", response_model=None)
    async def model(name: str, request: Request) -> Record:
        """Describe one of the models that the server lists."""
        return _model(service.model(name, tenant_of(request)), started, request)


_ENDS = ("first_id", "last_id")


def _model(info: ModelInfo, started: int, request: Request) -> Record:
    if speaks_anthropic(request):
        at = datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": info.id, "display_name": info.id, "created_at": at}
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
