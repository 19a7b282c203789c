"""Requests that are forwarded to an upstream which lists their path, in place of an answer made here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from fastapi import Request
from fastapi.responses import Response

from nearfar.edge_runtime.openai.responses.kept import is_reference
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest, ModelInfo, Prepared
from nearfar.fallback_server.engines.forwarding import ForwardedRequest
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.convert import JsonRequest
from nearfar.fallback_server.http.errors import ApiError
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.fallback_server.http.words import shown
from nearfar.fallback_server.tenants import MAX_PRIORITY, Tenant
from nearfar.remote.forms import Form, read_form
from nearfar.remote.server import MESSAGES, NATIVE, RESPONSES

FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Paths whose requests are forms."""
COUNTS = (f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens")
"""Paths that count the tokens of a prompt: any of the models that a name stands for may do that."""
FREE = (*COUNTS, "/v1/tokenize", "/v1/detokenize")
"""Paths that compute nothing: they cost no tokens."""
KEEPS = ("previous_response_id", "conversation", "background", "prompt")
"""Fields of responses that refer to something in this server's own memory."""


@runtime_checkable
class Forwards(Protocol):
    """An engine that forwards requests: see UpstreamEngine."""

    def native(self, path: str, model: str, tenant: Tenant) -> frozenset[str] | None:
        """Return the fields that a path takes upstream; None where no upstream lists it."""
        ...

    def forward(
        self, prepared: Prepared, path: str, call: Mapping[str, Any] | Form, takes: frozenset[str]
    ) -> ForwardedRequest:
        """Forward a request."""
        ...


class Forwarder:
    """Forwards requests to the upstreams of an engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def forwarded(
        self, request: JsonRequest, check: Callable[[Any], None] | None = None
    ) -> Response | None:
        """Return the upstream's answer; None where this server answers the request itself. `check` raises an
        error for a body that is not forwarded.

        Raises ApiError and RequestError for a request without a usable model.
        """
        path, engine = request.url.path, self._service.engine
        if request.method != "POST" or path not in NATIVE or not isinstance(engine, Forwards):
            return None
        tenant, form, body = tenant_of(request), None, dict[str, Any]()
        if path in FORMS:
            form = read_form(await request.body(), request.headers.get("content-type", ""))
        else:
            body = await request.read_json()
            if not isinstance(body, dict) or (path.startswith(RESPONSES) and _is_kept(path, body)):
                return None
        model = self._service.named(_name(body) if form is None else form.model, tenant)
        info = next((info for info in self._service.visible(tenant) if info.id == model), None)
        if info is not None:
            self._service.check_single(info, path, tenant)
            if path in COUNTS:
                model = _counting(engine, path, info, tenant)
        takes = engine.native(path, model, tenant)
        if takes is None:
            return None
        if check is not None:
            check(body)
        wanted = EngineRequest(
            f"fwd-{secrets.token_hex(12)}",
            model,
            prompts=("\n".join(_texts(body)),),
            tenant=tenant.within(_salt(body)),
            priority=_priority(body, tenant),
            body=body,
            most_tokens=0 if path in FREE else None,
        )
        return await TrackedCall(self._service, request, wanted).forward(
            lambda prepared: engine.forward(prepared, path, form or body, takes), _streams(body)
        )


async def absent(request: Request) -> Response:
    """Refuse a path that no upstream lists for the model."""
    raise ApiError(404, f"no upstream server offers {request.url.path} for this model", "model", "not_found")


def _counting(engine: Forwards, path: str, info: ModelInfo, tenant: Tenant) -> str:
    """Return the model whose server counts the tokens of a prompt to `info`."""
    allowed = filter(tenant.allows, info.stands_for)
    return next((name for name in allowed if engine.native(path, name, tenant) is not None), info.id)


def _is_kept(path: str, body: Mapping[str, Any]) -> bool:
    """Whether this server must remember the response, which may be continued unless the request says
    otherwise, or has what the request refers to.
    """
    given = body.get("input")
    items = given if isinstance(given, list) else ()
    refers = any(isinstance(item, dict) and is_reference(item) for item in items)
    refers = refers or any(body.get(name) is not None for name in KEEPS)
    return refers or (path == RESPONSES and body.get("store") is not False)


def _streams(body: Mapping[str, Any]) -> bool:
    return body.get("stream") is True


def _name(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not (isinstance(model, str) and 1 <= len(model) <= 256):
        raise RequestError(f"model must be a name of 1 to 256 characters, not {_given(model)}", "model")
    return model


def _given(text: Any) -> str:
    """Return a value that is not a text of the right length, for an error."""
    return f"{len(text):,}" if isinstance(text, str) and text else shown(text)


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 512):
        said = f"cache_salt must be a string of 1 to 512 characters, not {_given(salt)}"
        raise RequestError(said, "cache_salt")
    return salt


def _priority(body: Mapping[str, Any], tenant: Tenant) -> int:
    priority = body.get("priority")
    if priority is None:
        return max(0, tenant.priority)
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        said = (
            f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {shown(priority)}"
        )
        raise RequestError(said, "priority")
    return priority


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a body, without images and sounds."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str) and not item.startswith("data:"):
            yield item
        elif isinstance(item, dict):
            stack += reversed(item.values())
        elif isinstance(item, list):
            stack += reversed(item)
