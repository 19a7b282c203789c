"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.convertors import StringConvertor, register_url_convertor

from nearfar.edge_runtime.openai.responses.asking import chat_of
from nearfar.edge_runtime.openai.responses.kept import KeptResponse, KeptResponses
from nearfar.edge_runtime.openai.responses.shape import ResponseRecords, new_id
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import Prepared
from nearfar.fallback_server.http.apis.asking import Record, as_chat
from nearfar.fallback_server.http.apis.pages import ORDERS, USUAL, page_of
from nearfar.fallback_server.http.apis.responses import ReferenceItem, ResponseRequest
from nearfar.fallback_server.http.apis.responses_shape import ResponseShape
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.fallback_server.http.streams import streaming


class ResponseName(StringConvertor):
    """The id of a response in a path: any name but those of OpenAI's own paths below /v1/responses."""

    regex = r"(?!(?:compact|input_tokens)(?:/|$))[^/]+"


register_url_convertor("response", ResponseName())


def add(api: APIRouter, service: Service, kept: KeptResponses | None) -> None:
    """Add the routes to /v1. `kept`: the store of responses; with None no response is stored."""

    @api.post("/responses", response_model=None, responses=streaming())
    async def create(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation of items."""
        tenant, (given, before) = tenant_of(request), _asked(kept, request, body)
        wanted = as_chat(service, request, body.model, chat_of(given, before))
        stored = kept is not None and body.store is not False

        def told(record: Record) -> None:
            if stored and kept is not None:
                kept.keep(tenant.name, record, given, before)

        records = ResponseRecords(new_id("resp"), wanted.model, given, stored, told)
        return await TrackedCall(service, request, wanted).respond(ResponseShape(records), bool(body.stream))

    @api.post("/responses/input_tokens", response_model=None)
    async def count(body: ResponseRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        wanted = as_chat(service, request, body.model, chat_of(*_asked(kept, request, body)))

        async def told(prepared: Prepared) -> Record:
            return {"object": "response.input_tokens", "input_tokens": prepared.prompt_tokens}

        return await TrackedCall(service, request, wanted).count(told)

    @api.get("/responses/{name:response}", response_model=None)
    async def retrieve(name: str, request: Request, stream: str = "false") -> Record:
        """Return a stored response. Raises RequestError for `stream`: events are not stored."""
        if stream != "false":
            raise RequestError(
                "stream must be false here: a response is streamed only while it is made. Read it whole"
                if stream == "true"
                else f"stream must be true or false, not {stream!a:.40}",
                "stream",
            )
        return _found(kept, request, name).record

    @api.delete("/responses/{name:response}", response_model=None)
    async def delete(name: str, request: Request) -> Record:
        """Remove a stored response."""
        _found(kept, request, name)
        _store(kept).remove(tenant_of(request).name, name)
        return {"id": name, "object": "response", "deleted": True}

    @api.get("/responses/{name:response}/input_items", response_model=None)
    async def input_items(
        name: str,
        request: Request,
        limit: str = str(USUAL),
        order: str = ORDERS[0],
        after: str | None = None,
    ) -> Record:
        """List the items that a stored response answered, page by page, the newest first."""
        return page_of(_found(kept, request, name).items, limit, order, after)


def _store(kept: KeptResponses | None) -> KeptResponses:
    if kept is None:
        raise ApiError(404, "this server keeps no responses (--no-store)", None, "no_store")
    return kept


def _found(kept: KeptResponses | None, request: Request, name: str) -> KeptResponse:
    """Return a stored response of the tenant who asks. Raises ApiError with 404 where there is none."""
    try:
        return _store(kept).find(tenant_of(request).name, name)
    except RequestError as error:
        raise ApiError(404, str(error), None, "response_not_found") from error


def _asked(
    kept: KeptResponses | None, request: Request, body: ResponseRequest
) -> tuple[Record, list[Record]]:
    """Return the request as JSON, and the messages of the responses that it continues."""
    given, before = body.given, body.previous_response_id
    refers = not isinstance(body.input, str) and any(isinstance(i, ReferenceItem) for i in body.input or ())
    if kept is None and (refers or before is not None):
        raise ApiError(
            400,
            "this server keeps no responses (--no-store): send the whole conversation as input",
            "input" if refers else "previous_response_id",
            "no_store",
        )
    if kept is None:
        return given, []
    owner = tenant_of(request).name
    try:
        given["input"] = kept.resolved(owner, given.get("input"))
        return given, kept.messages(owner, before)
    except RequestError as error:
        what = "previous_response" if error.param == "previous_response_id" else "item"
        raise ApiError(400, str(error), error.param, f"{what}_not_found") from error
