"""Answers OpenAI's completions: what the routes of chat completions and of plain completions share."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request
from fastapi.responses import Response

from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.answering import CompletionResponse
from nearfar.fallback_server.http.apis.asking import asked
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest
from nearfar.fallback_server.http.service import Service
from nearfar.fallback_server.http.shapes import ChatShape, CompletionShape, ResponseHead


async def complete(service: Service, request: Request, body: ChatRequest | CompletionRequest) -> Response:
    """Answer a completion. An engine that passes requests on gets the body as received."""
    wanted = asked(service, request, body)
    if service.engine.passes_on and isinstance(request, convert.JsonRequest):
        came = convert.as_it_came(request.read, body)
        wanted = replace(wanted, body=came, passed=True)
    continuous = wanted.usage_asked and bool(wanted.stream_options.get("continuous_usage_stats"))
    head = ResponseHead(wanted.id, wanted.model, wanted.usage_asked, continuous, wanted.token_ids)
    kind = ChatShape if wanted.chat else CompletionShape
    shape = CompletionResponse(kind(head, wanted.choices), head)
    return await TrackedCall(service, request, wanted).respond(shape, bool(body.stream))
