"""The routes of Ollama's API, for clients that speak no other. Models are loaded when the server starts, so
there is nothing to pull, create or delete.
"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from nearfar.fallback_server.engines.base import EngineRequest, ModelInfo
from nearfar.fallback_server.http.apis.asking import Record, as_chat, asked, asked_vectors
from nearfar.fallback_server.http.apis.ollama import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    NamedBody,
    OllamaFields,
)
from nearfar.fallback_server.http.apis.ollama_shape import NDJSON, OllamaShape, never, now
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.embedding import EmbeddingShape
from nearfar.fallback_server.http.schemas import CompletionRequest, EmbeddingRequest
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.fallback_server.http.streams import streaming
from nearfar.version import __version__

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /api."""

    @api.post("/chat", response_model=None, responses=streaming(NDJSON))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        if not body.messages:  # a request without messages asks to load the model
            return _loaded(service, request, body.model, {"message": {"role": "assistant", "content": ""}})
        wanted = as_chat(service, request, _name(service, request, body.model), body.chat)
        return await _answered(service, request, wanted, body)

    @api.post("/generate", response_model=None, responses=streaming(NDJSON))
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Answer one question, or continue a text as it is (`raw`)."""
        model = _name(service, request, body.model)
        if not body.prompt:
            return _loaded(service, request, body.model, {"response": ""})
        if body.raw:
            fields = {name: value for name, value in body.fields().items() if value is not None}
            limit = fields.pop("max_completion_tokens", 2**31 - 1)
            fields.pop("think", None)
            given = {**fields, "prompt": body.prompt, "max_tokens": limit, "model": model}
            wanted = asked(service, request, CompletionRequest.model_validate(given))
        else:
            wanted = as_chat(service, request, model, body.chat)
        return await _answered(service, request, wanted, body)

    @api.post("/embed", response_model=None)
    async def embed(body: EmbedBody, request: Request) -> Response:
        """Return the vectors of one or several texts."""
        started = time.monotonic_ns()
        shape = EmbeddingShape("", False, body.dimensions, normalize=not service.engine.passes_on)
        name = _name(service, request, body.model)
        given = EmbeddingRequest(model=name, input=body.input, dimensions=body.dimensions)
        return await _vectors(service, request, given, shape, started)

    @api.post("/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        """Return the vector of one text."""
        name = _name(service, request, body.model)
        shape = EmbeddingShape("", normalize=not service.engine.passes_on)
        given = EmbeddingRequest.model_validate({"model": name, "input": body.prompt})
        return await _vectors(service, request, given, shape, None)

    @api.get("/tags", response_model=None)
    async def tags(request: Request) -> Record:
        """List the models that the key may use."""
        return {"models": [_listed(info) for info in service.visible(tenant_of(request))]}

    @api.get("/ps", response_model=None)
    async def running(request: Request) -> Record:
        """List the loaded models: all that the key may use."""
        listed = [_listed(info) for info in service.visible(tenant_of(request))]
        return {"models": [{**each, "size_vram": 0, "expires_at": never()} for each in listed]}

    @api.post("/show", response_model=None)
    async def show(body: NamedBody, request: Request) -> Record:
        """Describe a model. Raises ApiError with 404 for an unknown one."""
        name = _name(service, request, body.model or body.name)
        found = service.model(name, tenant_of(request))
        length = {"nearfar.context_length": found.context_length} if found.context_length else {}
        return {
            "modelfile": "", "parameters": "", "template": "", "details": _details(),
            "model_info": {"general.architecture": "nearfar", **length},
            "capabilities": ["completion", "tools"],
        }  # fmt: skip

    @api.get("/version", response_model=None)
    async def version() -> Record:
        """Return the version of this server."""
        return {"version": __version__}


async def _answered(
    service: Service, request: Request, wanted: EngineRequest, body: OllamaFields
) -> Response:
    """Answer with text, as a stream unless the client does not want one."""
    call = TrackedCall(service, request, wanted)
    shape = OllamaShape(wanted.model, call.times, chat=isinstance(body, ChatBody))
    return await call.respond(shape, body.stream is not False)


async def _vectors(
    service: Service, request: Request, body: EmbeddingRequest, shape: EmbeddingShape, started: int | None
) -> Response:
    """Return vectors in Ollama's shape. `started`: time in ns; None for the older form with one vector."""
    wanted = asked_vectors(service, request, body)

    def told(record: Record) -> Record:
        vectors = [item["embedding"] for item in record["data"]]
        if started is None:
            return {"embedding": vectors[0]}
        return {
            "model": wanted.model, "embeddings": vectors, "total_duration": time.monotonic_ns() - started,
            "load_duration": 0, "prompt_eval_count": record["usage"]["prompt_tokens"],
        }  # fmt: skip

    return await TrackedCall(service, request, wanted).embed(shape, told)


def _name(service: Service, request: Request, given: str | None) -> str:
    """The name of the requested model, without Ollama's tag where only the bare name is known."""
    tenant = tenant_of(request)
    model, known = service.named(given, tenant), {info.id for info in service.visible(tenant)}
    bare = model.removesuffix(LATEST)
    return bare if model not in known and bare in known else model


def _loaded(service: Service, request: Request, given: str | None, said: Record) -> Response:
    """Answer a request that only loads a model: all models are loaded already. `said`: the field with the
    text of the path's other answers. Raises ApiError with 404 for an unknown model.
    """
    name = service.model(_name(service, request, given), tenant_of(request)).id
    return JSONResponse({"model": name, "created_at": now(), **said, "done": True, "done_reason": "load"})


def _listed(info: ModelInfo) -> Record:
    return {
        "name": info.id, "model": info.id, "modified_at": now(), "size": 0, "digest": "",
        "details": _details(),
    }  # fmt: skip


def _details() -> Record:
    return {
        "parent_model": "", "format": "nearfar", "family": "", "families": [], "parameter_size": "",
        "quantization_level": "",
    }  # fmt: skip
