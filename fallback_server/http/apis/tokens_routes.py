"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import model_validator

from nearfar.errors import RequestError
from nearfar.fallback_server.engines.base import Prepared
from nearfar.fallback_server.http.apis.asking import Record, as_chat, asked
from nearfar.fallback_server.http.calls import TrackedCall
from nearfar.fallback_server.http.fields import MAX_PROMPT_TOKENS, Only, Strict, TokenId, few, many
from nearfar.fallback_server.http.schemas import (
    MAX_MESSAGES,
    CompletionRequest,
    Message,
    ModelName,
    TemplateVariables,
    Tool,
    check_turns,
)
from nearfar.fallback_server.http.service import Service, tenant_of
from nearfar.format.requests import MAX_TOOLS


class TokenizeRequest(Strict):
    """/tokenize: a text (`prompt`), or a conversation (`messages`) as the chat template writes it."""

    model: ModelName = None
    prompt: str | None = None
    messages: Annotated[list[Message], many(MAX_MESSAGES, 1), few(MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], many(MAX_TOOLS), few(MAX_TOOLS)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: Annotated[object, Only((True, False))] = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        if self.messages is not None:
            check_turns(self.messages, self.continue_final_message, self.add_generation_prompt)
        return self


class DetokenizeRequest(Strict):
    """/detokenize: tokens to convert to text."""

    model: ModelName = None
    tokens: Annotated[list[TokenId], many(MAX_PROMPT_TOKENS), few(MAX_PROMPT_TOKENS)]


def add(api: APIRouter, service: Service) -> None:
    """Add the routes to /v1."""

    @api.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the tokens of a text or of a conversation."""
        if body.messages is not None:
            dumped = body.model_dump(exclude_none=True, by_alias=True)
            names = (
                "messages", "tools", "continue_final_message", "add_generation_prompt", "chat_template_kwargs"
            )  # fmt: skip
            wanted = as_chat(service, request, body.model, {name: dumped.get(name) for name in names})
        else:
            given = {"model": body.model, "prompt": body.prompt or ""}
            wanted = asked(service, request, CompletionRequest.model_validate(given))
        length = next((i.context_length for i in service.engine.models() if i.id == wanted.model), 0)

        async def told(prepared: Prepared) -> Record:
            if not prepared.prompts:
                raise RequestError("this server has no tokenizer: ask the server that computes the model")
            (tokens,) = prepared.prompts
            strings = await service.engine.names_of(tokens) if body.return_token_strs else None
            return {
                "count": len(tokens), "max_model_len": length, "tokens": list(tokens), "token_strs": strings
            }  # fmt: skip

        return await TrackedCall(service, request, wanted).count(told, MAX_PROMPT_TOKENS)

    @api.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Record:
        """Return the text of tokens."""
        tenant = tenant_of(request)
        found = service.model(service.named(body.model, tenant), tenant)
        service.check_single(found, request.url.path, tenant)
        return {"prompt": await service.engine.text_of(body.tokens)}
