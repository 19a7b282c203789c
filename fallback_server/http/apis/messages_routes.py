"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.engines.base import Prepared
from nearfar.fallback_server.http.apis.asking import Record, as_chat
from nearfar.fallback_server.http.apis.messages import CountRequest, MessageRequest, chat_of
from nearfar.fallback_server.http.apis.messages_shape import MessageShape
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.service import Service
from nearfar.fallback_server.http.streams import streaming


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /v1."""

    @api.post("/messages", response_model=None, responses=streaming())
    async def create(body: MessageRequest, request: Request, beta: str = "") -> Response:
        """Answer a conversation. `beta` marks the paths of a client's beta methods and changes nothing."""
        wanted = as_chat(service, request, body.model, chat_of(body))
        return await TrackedCall(service, request, wanted).respond(
            MessageShape(wanted.model), bool(body.stream)
        )

    @api.post("/messages/count_tokens", response_model=None)
    async def count(body: CountRequest, request: Request, beta: str = "") -> Response:
        """Count the tokens of a conversation. `beta` changes nothing."""
        wanted = as_chat(service, request, body.model, chat_of(body))

        async def told(prepared: Prepared) -> Record:
            return {"input_tokens": prepared.prompt_tokens}

        return await TrackedCall(service, request, wanted).count(told)
