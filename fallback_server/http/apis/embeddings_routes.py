"""The route of OpenAI's embeddings."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.apis.asking import asked_vectors
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.embedding import EmbeddingShape
from nearfar.fallback_server.http.schemas import EmbeddingRequest
from nearfar.fallback_server.http.service import Service


def add(api: APIRouter, service: Service) -> None:
    """Add the route to /v1."""

    @api.post("/embeddings", response_model=None)
    async def embed(body: EmbeddingRequest, request: Request) -> Response:
        """Return the vectors of texts. An engine that passes requests on gets the body as received."""
        wanted, passed = asked_vectors(service, request, body), service.engine.passes_on
        if passed and isinstance(request, convert.JsonRequest):
            wanted = replace(wanted, body=convert.as_it_came(request.read, body))
        coded = body.encoding_format == "base64"
        shape = EmbeddingShape(wanted.model, coded, body.dimensions, normalize=not passed)
        return await TrackedCall(service, request, wanted).embed(shape)
