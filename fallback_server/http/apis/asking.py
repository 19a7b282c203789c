"""Helpers that the APIs share: a request of another API becomes a chat completion and is answered as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic import ValidationError, ValidatorFunctionWrapHandler

from nearfar.edge_runtime.openai.responses.asking import present
from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import EngineRequest
from nearfar.fallback_server.http import convert
from nearfar.fallback_server.http.embedding import embedding
from nearfar.fallback_server.http.faults import fault_of
from nearfar.fallback_server.http.ignoring import ignored, passes_on
from nearfar.fallback_server.http.names import turn
from nearfar.fallback_server.http.places import fault_at, moved
from nearfar.fallback_server.http.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.fallback_server.http.words import shown

Record = dict[str, Any]


def skip(name: str, said: str) -> None:
    """Leave out a value that this server does not know. The answer's header names it (`name`), or a strict
    server rejects it with ValueError (`said`). To be called while a request is validated.
    """
    if (found := ignored.get()) is not None:
        found.add(name)
    else:
        raise ValueError(said)


def kept_of(given: list[Any], known: Iterable[str]) -> list[int]:
    """Return the indexes of the entries that are not objects of an unknown `type`."""
    kinds = [item.get("type") if isinstance(item, dict) else None for item in given]
    return [at for at, kind in enumerate(kinds) if not isinstance(kind, str) or kind in known]


def known_of(given: Any, field: str, known: Iterable[str], handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate the list without objects whose `type` is not in `known`; these are skipped by type. Errors
    have the indexes of the list that the client sent.
    """
    if not isinstance(given, list):
        return handler(given)
    kept = kept_of(given, known)
    if len(kept) == len(given):
        return handler(given)
    read = set(kept)
    for at, item in enumerate(given):
        if at in read:
            continue
        kind = item["type"]
        try:
            skip(f"{field}.{kind}", f"an entry of type {shown(kind)} is not known here; leave it out")
        except ValueError as error:
            raise fault_at((at,), str(error), item) from error
    try:
        return handler([given[at] for at in kept])
    except ValidationError as error:
        raise moved(error, kept) from error


def longest_of(parts: Mapping[str, int]) -> str:
    """Return the place of the longest part of a prompt. `parts`: the length of each, by its place."""
    return max(parts, key=lambda place: parts[place])


def as_chat(
    service: Service, request: Request, model: str | None, fields: Mapping[str, Any]
) -> EngineRequest:
    """Make the engine's request for a chat completion with these fields; None means a field is not given.

    Raises RequestError, in terms of the chat completion's fields, where they do not fit together: errors.py
    names the client's own. The places inside of a field are the chat completion's alone, and are left out.
    """
    given = present(**fields)
    if not given["messages"]:
        raise RequestError(
            "messages: there is nothing to answer: send at least one message with text", "messages"
        )
    turn(request)
    token = passes_on.set(service.engine.passes_on)  # images are for an upstream that may read them
    try:
        body = ChatRequest.model_validate({**given, "model": model})
    except ValidationError as error:
        fault = fault_of(error.errors(), ChatRequest)
        raise RequestError(fault.outside, fault.param) from error
    finally:
        passes_on.reset(token)
    return asked(service, request, body)


def asked(service: Service, request: Request, body: ChatRequest | CompletionRequest) -> EngineRequest:
    """Make the engine's request for a completion, for the tenant of the HTTP request."""
    tenant = tenant_of(request)
    body = body.model_copy(update={"model": service.named(body.model, tenant)})
    made = convert.chat(body) if isinstance(body, ChatRequest) else convert.completion(body)
    priority = max(0, tenant.priority) if body.priority is None else body.priority
    return replace(made, tenant=tenant.within(body.cache_salt), priority=priority)


def asked_vectors(service: Service, request: Request, body: EmbeddingRequest) -> EngineRequest:
    """Return the engine's request for vectors, of the tenant who asks."""
    tenant = tenant_of(request)
    named = body.model_copy(update={"model": service.named(body.model, tenant)})
    return replace(embedding(named), tenant=tenant, priority=max(0, tenant.priority))
