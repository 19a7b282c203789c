"""The routes /v1/rerank and /v2/rerank."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.http.apis.decisions_routes import asked
from nearfar.fallback_server.http.apis.rerank import TEMPLATE, RerankRequest, question, ranked
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.service import Service


def add(api: APIRouter, service: Service) -> None:
    """Add the route to /v1 or /v2."""

    @api.post("/rerank", response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Order documents by how well they answer a query."""
        questions = [
            question(body.asked, text, body.instruction, f"documents.{at}")
            for at, text in enumerate(body.texts)
        ]
        wanted = replace(asked(service, request, body.model, questions), template=TEMPLATE)
        return await TrackedCall(service, request, wanted).score(
            lambda found: ranked(body, wanted.model, found)
        )
