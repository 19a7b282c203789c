"""The routes /v1/decisions and /v1/score."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.engines.base import EngineRequest, Question
from nearfar.fallback_server.http.apis import score
from nearfar.fallback_server.http.apis.asking import as_chat
from nearfar.fallback_server.http.apis.decisions import (
    DecisionRequest,
    decision,
    input_messages,
    questions_of,
)
from nearfar.fallback_server.http.apis.score import ScoreBody
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.service import Service, tenant_of


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /v1."""

    @api.post("/decisions", response_model=None)
    async def decide(body: DecisionRequest, request: Request) -> Response:
        """Answer typed questions about an input by probabilities, without generating text."""
        fields = {"messages": input_messages(body), "chat_template_kwargs": body.chat_template_kwargs}
        chat = as_chat(service, request, body.model, fields)
        questions = questions_of(body, chat.messages)
        wanted = replace(chat, messages=(), questions=tuple(questions))
        return await TrackedCall(service, request, wanted).score(
            lambda found: decision(body, wanted.model, found), len(body.questions)
        )

    @api.post("/score", response_model=None)
    async def scores(body: ScoreBody, request: Request) -> Response:
        """Return the probabilities of labels after a query and each item."""
        wanted = asked(service, request, body.model, score.questions_of(body))
        wanted = replace(wanted, template=score.template_of(body) or wanted.template)
        return await TrackedCall(service, request, wanted).score(
            lambda found: score.scored(body, wanted.model, found)
        )


def asked(service: Service, request: Request, model: str | None, questions: Seq[Question]) -> EngineRequest:
    """Make the engine's request for the probabilities of labels, of the tenant who asks."""
    tenant = tenant_of(request)
    return EngineRequest(
        f"score-{secrets.token_hex(12)}",
        service.named(model, tenant),
        questions=tuple(questions),
        max_tokens=0,
        priority=max(0, tenant.priority),
        tenant=tenant,
    )
