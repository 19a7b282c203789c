"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from nearfar.fallback_server.engines.base import Prepared
from nearfar.fallback_server.http.apis.asking import Record, as_chat
from nearfar.fallback_server.http.apis.kept import KeptResponses
from nearfar.fallback_server.http.apis.responses import ResponseRequest, chat_of, messages_of
from nearfar.fallback_server.http.apis.responses_shape import ResponseShape
from nearfar.fallback_server.http.calls import Call, Service, tenant_of
from nearfar.fallback_server.http.errors import ApiError


def add(api: APIRouter, service: Service, kept: KeptResponses | None) -> None:
    """Add the routes to /v1. `kept`: the store of responses; None stores none."""

    @api.post("/responses", response_model=None)
    async def create(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation of items."""
        tenant, before = tenant_of(request), _before(kept, request, body)
        wanted = as_chat(service, request, body.model, chat_of(body, before))
        stored = kept is not None and body.store is not False

        def told(record: Record) -> None:
            if stored and kept is not None:
                messages = [*before, *messages_of(body.input), *_said(record)]
                kept.put(tenant, record, _items(body), messages)

        name = f"resp_{secrets.token_hex(20)}"
        shape = ResponseShape(name, wanted.model, body, stored, told)
        return await Call(service, request, wanted).respond(shape, bool(body.stream))

    @api.post("/responses/input_tokens", response_model=None)
    async def count(body: ResponseRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        wanted = as_chat(service, request, body.model, chat_of(body, _before(kept, request, body)))

        async def told(prepared: Prepared) -> Record:
            return {"object": "response.input_tokens", "input_tokens": prepared.prompt_tokens}

        return await Call(service, request, wanted).count(told)

    @api.get("/responses/{name}", response_model=None)
    async def retrieve(name: str, request: Request) -> Record:
        """Return a stored response."""
        return _store(kept).find(tenant_of(request), name).record

    @api.delete("/responses/{name}", response_model=None)
    async def delete(name: str, request: Request) -> Record:
        """Remove a stored response."""
        _store(kept).remove(tenant_of(request), name)
        return {"id": name, "object": "response", "deleted": True}

    @api.get("/responses/{name}/input_items", response_model=None)
    async def input_items(name: str, request: Request) -> Record:
        """List the items that a stored response answered, the newest first."""
        items = _store(kept).find(tenant_of(request), name).items[::-1]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return {
            "object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False
        }  # fmt: skip


def _store(kept: KeptResponses | None) -> KeptResponses:
    if kept is None:
        raise ApiError(404, "this server keeps no responses (--no-store)", None, "no_store")
    return kept


def _before(kept: KeptResponses | None, request: Request, body: ResponseRequest) -> list[Record]:
    """Return the messages of the responses that this request continues."""
    if body.previous_response_id is None:
        return []
    if kept is None:
        raise ApiError(
            400,
            "this server keeps no responses (--no-store): send the whole conversation as input",
            "previous_response_id",
            "no_store",
        )
    return kept.find(tenant_of(request), body.previous_response_id, "previous_response_id").messages


def _items(body: ResponseRequest) -> list[Record]:
    """Return the items of a request, each with an id."""
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        given: list[Record] = [{"type": "message", "role": "user", "content": content}]
    else:
        given = [item.model_dump(exclude_none=True) for item in body.input or ()]
    return [{"id": f"item_{secrets.token_hex(12)}", **item} for item in given]


def _said(record: Record) -> list[Record]:
    """Return an answer's message in the form that a later request sends it back."""
    output: list[Any] = record["output"]
    return messages_of(ResponseRequest.model_validate({"input": _bare(output)}).input)


def _bare(output: list[Any]) -> list[Record]:
    """Return a response's items without fields that requests do not have: ids, annotations,
    log-probabilities.
    """
    made: list[Record] = []
    for item in output:
        left = {name: value for name, value in item.items() if name not in ("id", "status")}
        if "content" in left:
            left["content"] = [{"type": part["type"], "text": part["text"]} for part in left["content"]]
        made.append(left)
    return made
