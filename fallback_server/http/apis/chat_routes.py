"""The route of OpenAI's chat completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.http.apis.completing import complete
from nearfar.fallback_server.http.schemas import ChatRequest
from nearfar.fallback_server.http.service import Service
from nearfar.fallback_server.http.streams import streaming


def add(api: APIRouter, service: Service) -> None:
    """Add the route to /v1."""

    @api.post("/chat/completions", response_model=None, responses=streaming())
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await complete(service, request, body)
