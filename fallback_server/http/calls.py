"""One call from admission to its last token: the same steps for chats and completions, whole and streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from nearfar.fallback_server.engines.base import Answers, Engine, EngineRequest, Piece, Prepared, TokenUsage
from nearfar.fallback_server.http.errors import ApiError, Problem, problem_of
from nearfar.fallback_server.http.keys import ANYONE, Key
from nearfar.fallback_server.http.limits import Admission, Ticket
from nearfar.fallback_server.http.logs import AuditEntry, AuditLog
from nearfar.fallback_server.http.metrics import Metrics
from nearfar.fallback_server.http.shapes import Shape
from nearfar.fallback_server.http.streams import DONE, ClientGoneError, EventStream, event, unless_gone
from nearfar.fallback_server.http.tracing import Span, Tracer

GONE = 499
"""Status of a request whose client left; it is only ever logged."""


@dataclass
class Service:
    """What all calls share."""

    engine: Engine
    admission: Admission
    metrics: Metrics
    tracer: Tracer
    audit: AuditLog | None = None
    draining: bool = False
    live: dict[str, Call] = field(default_factory=dict)


def key_of(request: Request) -> Key:
    """Who is asking."""
    key = getattr(request.state, "key", ANYONE)
    assert isinstance(key, Key)
    return key


def check_model(service: Service, key: Key, model: str) -> None:
    """Refuse a model that is not here, or not for this key; both look the same."""
    known = [info.id for info in service.engine.models() if key.allows(info.id)]
    if model not in known:
        raise ApiError(404, f"there is no model {model!r:.100}; there are {', '.join(known) or 'none for this key'}",
                       "model", "model_not_found")  # fmt: skip


class Call:
    """A call on its way. Whatever happens, it ends once: place given back, counted, logged."""

    def __init__(self, service: Service, request: Request, wanted: EngineRequest) -> None:
        self.service, self.request, self.wanted = service, request, wanted
        self.key = key_of(request)
        self.started = time.monotonic()
        self._ticket: Ticket | None = None
        self._answers: Answers | None = None
        self._prepared: Prepared | None = None
        self._texts: dict[int, list[str]] = {}
        self._last = 0.0
        self._ended = False
        operation = "chat" if wanted.chat else "text_completion"
        self._span: Span = service.tracer.span(operation, wanted.model, request.headers)

    async def respond(self, shape: Shape, stream: bool, include_usage: bool) -> Response:
        """Run the call. For a stream, the status is that of what happens up to the first piece."""
        try:
            check_model(self.service, self.key, self.wanted.model)
            if self.service.draining:
                raise ApiError(503, "the server is shutting down", None, "shutting_down", 5.0)
            self._ticket = self.service.admission.enter(self.key)
            self.service.live[self.wanted.id] = self
            if stream:
                pieces = self._pieces()
                first = await unless_gone(self.request.receive, anext(pieces, Piece(0)))
                return EventStream(self._events(shape, first, pieces, include_usage))
            record = await unless_gone(self.request.receive, self._whole(shape))
            await self._end(200, "ok")
            return JSONResponse(record)
        except ClientGoneError:
            await self._end(GONE, "aborted")
            return Response(status_code=GONE)
        except asyncio.CancelledError:
            await self._end(GONE, "aborted")
            raise
        except Exception as error:
            problem = problem_of(error)
            await self._end(problem.status, _outcome(problem))
            return problem.response()

    async def cancel(self) -> None:
        """End the call from outside; its client gets what there is."""
        await self.service.engine.cancel(self.wanted.id)

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        if self._answers is not None:
            return self._answers.usage
        return TokenUsage(self._prepared.prompt_tokens if self._prepared else 0)

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        """Prepare, submit, and watch the pieces pass."""
        engine = self.service.engine
        prepared = self._prepared = await engine.prepare(self.wanted)
        assert self._ticket is not None
        self._ticket.charge(prepared)
        answers = self._answers = await engine.submit(prepared)
        self.service.metrics.prompt_length.observe(prepared.prompt_tokens)
        async with aclosing(answers.pieces()) as pieces:
            async for piece in pieces:
                self._watch(piece)
                yield piece

    async def _whole(self, shape: Shape) -> dict[str, object]:
        async with aclosing(self._pieces()) as pieces:
            made = [piece async for piece in pieces]
        return shape.whole(made, self.wanted.choices, self.usage)

    async def _events(
        self, shape: Shape, first: Piece, rest: AsyncGenerator[Piece, None], include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """The stream. An error after its beginning is an event of its own, and the last."""
        status, outcome = GONE, "aborted"
        try:
            async with aclosing(rest):
                for index in range(self.wanted.choices):
                    if (opening := shape.opening(index, self.usage)) is not None:
                        yield event(opening)
                if (chunk := shape.chunk(first, self.usage)) is not None:
                    yield event(chunk)
                async for piece in rest:
                    if (chunk := shape.chunk(piece, self.usage)) is not None:
                        yield event(chunk)
            if include_usage:
                yield event(shape.final(self.usage))
            status, outcome = 200, "ok"
            yield DONE
        except Exception as error:
            problem = problem_of(error)
            status, outcome = problem.status, _outcome(problem)
            yield event(problem.body)
        finally:
            await self._end(status, outcome)

    def _watch(self, piece: Piece) -> None:
        metrics, now = self.service.metrics, time.monotonic()
        if piece.tokens:
            if not self._last:
                metrics.first_token.observe(now - self.started)
                self._span.add_event("first token")
            elif self.wanted.choices == 1:
                metrics.between.observe((now - self._last) / piece.tokens)
            self._last = now
        if piece.finish is not None:
            metrics.finished(piece.finish)
        if self.service.audit is not None and self.service.audit.text:
            self._texts.setdefault(piece.index, []).append(piece.text)

    async def _end(self, status: int, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        usage, service = self.usage, self.service
        service.live.pop(self.wanted.id, None)
        if self._ticket is not None:
            self._ticket.leave(usage.completion)
        seconds = time.monotonic() - self.started
        service.metrics.outcome(outcome)
        if outcome == "ok":
            service.metrics.whole.observe(seconds)
            service.metrics.answer_length.observe(usage.completion)
        self._trace(status, usage)
        if service.audit is not None:
            service.audit.write(self._entry(status, outcome, usage, seconds))
        if self._answers is not None:
            await self._answers.aclose()

    def _trace(self, status: int, usage: TokenUsage) -> None:
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion)
        self._span.end()

    def _entry(self, status: int, outcome: str, usage: TokenUsage, seconds: float) -> AuditEntry:
        assert self.service.audit is not None
        text = self.service.audit.text
        return AuditEntry(
            request_id=self.request.state.request_id,
            key=self.key.name,
            endpoint=self.request.url.path,
            model=self.wanted.model,
            status=status,
            outcome=outcome,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            seconds=round(seconds, 4),
            prompt=(self.wanted.messages or self.wanted.prompts) if text else None,
            answer=["".join(self._texts[index]) for index in sorted(self._texts)] if text else None,
        )


def _outcome(problem: Problem) -> str:
    if problem.status == 429:
        return "limited"
    return "refused" if problem.status < 500 else "failed"
