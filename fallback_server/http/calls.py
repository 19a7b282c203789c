"""One call from admission to its last token. Chats and completions, whole and streamed, and vectors take the
same steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from nearfar.edge_runtime.openai.pieces import Piece
from nearfar.errors import EngineError
from nearfar.fallback_server.engines.base import (
    Answers,
    EngineRequest,
    ModelInfo,
    Prepared,
    Scores,
    TokenUsage,
)
from nearfar.fallback_server.engines.forwarding import ForwardedChunk, ForwardedRequest
from nearfar.fallback_server.http.answering import ResponseWriter, ended
from nearfar.fallback_server.http.audit_text import AuditText
from nearfar.fallback_server.http.bodies import json_response
from nearfar.fallback_server.http.embedding import EmbeddingShape
from nearfar.fallback_server.http.errors import GONE, ApiError, problem_of
from nearfar.fallback_server.http.ignoring import ignore, names_of
from nearfar.fallback_server.http.limits import answer_weight
from nearfar.fallback_server.http.logs import AuditEntry
from nearfar.fallback_server.http.metrics import CallMetrics
from nearfar.fallback_server.http.middleware import TRACKED
from nearfar.fallback_server.http.names import own_names, was_turned
from nearfar.fallback_server.http.service import Service, outcome_of, ticket_of
from nearfar.fallback_server.http.streams import EVENTS, ClientGoneError, EventStream, event, unless_gone
from nearfar.fallback_server.http.times import CallTimes
from nearfar.fallback_server.http.tracing import TraceSpan
from nearfar.remote.chunks import Passed
from nearfar.remote.server import ESTIMATED_HEADER

TOKEN_BYTES = 200
"""Bytes of a whole answer of an upstream that count as one token under way."""
ESTIMATED = "input_tokens"
"""The figure that may be an estimate, as the header names it."""


class TrackedCall:
    """A call under way. However it ends, exactly once its place is freed, and it is counted and logged.

    `wanted` names the requested model until the engine has chosen the one that answers, and that model from
    then on.
    """

    def __init__(self, service: Service, request: Request, wanted: EngineRequest) -> None:
        self.service, self.request, self.wanted = service, request, wanted
        self.times = CallTimes()
        request.scope["state"][TRACKED] = True
        self._ticket = ticket_of(request)
        self._answers: Answers | None = None
        self._prepared: Prepared | None = None
        self._counted: TokenUsage | None = None  # of inputs that were embedded or scored
        self._forwarded: ForwardedRequest | None = None
        self._first: asyncio.Future[Piece] | None = None
        self._rest: AsyncGenerator[Piece, None] | None = None
        audits = service.audit is not None and service.audit.text
        self._said = AuditText() if audits else None
        self._status, self._outcome = GONE, "aborted"  # the status of a stream that does not come to its end
        self._ended = False
        self._cancelled = False  # by an administrator, maybe before the engine knows the request
        self._known_as = ""  # the id that an upstream gave the answer
        self._shape: ResponseWriter | None = None
        self._listed: ModelInfo | None = None  # the requested model, where there is one of that name
        self._metrics: CallMetrics | None = None  # once the model that answers is known
        operation = "chat" if wanted.chat else "text_completion" if wanted.pooling is None else "embeddings"
        operation = "decisions" if wanted.questions else operation
        self._span: TraceSpan = service.tracer.span(operation, wanted.model, request.headers)

    async def respond(self, shape: ResponseWriter, stream: bool) -> Response:
        """Answer the request. A stream's status is determined by what happens up to the first piece, or
        within `keep_alive` seconds.
        """
        self._shape = shape
        if stream:
            return await self._run(lambda: self._stream(shape))
        return await self._run(lambda: self._at_once(self._whole(shape)))

    async def embed(
        self, shape: EmbeddingShape, told: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record
    ) -> Response:
        """Answer with vectors. `told` converts OpenAI's record to another API's."""
        return await self._run(lambda: self._at_once(self._vectors(shape, told)))

    async def score(self, shape: Callable[[Scores], dict[str, Any]], answers: int = 0) -> Response:
        """Answer with what `shape` makes of the log-probabilities of labels. `answers`: how many tokens of
        output these count as.
        """

        async def scored() -> Response:
            found = await self.service.engine.score(await self._prepare())
            self._counted = TokenUsage(found.tokens, answers)
            return await json_response(shape(found), sum(map(len, found.found)))

        return await self._run(lambda: self._at_once(scored()))

    async def count(
        self, record: Callable[[Prepared], Awaitable[dict[str, object]]], most: int = 0
    ) -> Response:
        """Answer with the prompt's tokens, at most `most`, or with their number alone; `record` makes the
        answer. Nothing is computed, so this costs no tokens.
        """
        self.wanted = replace(self.wanted, most_tokens=most)

        async def counted() -> Response:
            prepared = await self._tokens()
            made = await json_response(await record(prepared), sum(map(len, prepared.prompts)))
            if prepared.estimated:
                made.headers[ESTIMATED_HEADER] = ESTIMATED
            return made

        return await self._run(lambda: self._at_once(counted()))

    async def forward(self, forward: Callable[[Prepared], ForwardedRequest], stream: bool) -> Response:
        """Answer with what an upstream answers to the request as it is."""
        return await self._run(lambda: self._forward(forward, stream))

    async def _forward(self, forward: Callable[[Prepared], ForwardedRequest], stream: bool) -> Response:
        async def begin() -> tuple[AsyncGenerator[ForwardedChunk, None], ForwardedChunk]:
            prepared = await (self._tokens() if self.wanted.most_tokens is not None else self._prepare())
            while True:
                made = self._forwarded = forward(prepared)
                parts = made.parts() if self._said is None else self._said.overheard(made.parts())
                try:
                    return parts, await anext(parts, ForwardedChunk(b"", "application/octet-stream"))
                except EngineError as error:
                    prepared = await self._instead(error)

        parts, first = await unless_gone(self.request.receive, begin())
        self._name_ignored(first.ignored)
        if stream and first.streams:
            keep_alive = self.service.admission.limits.keep_alive
            return EventStream(self._forwarded_events(first, parts), self._finish, keep_alive)
        data = [first.data]
        self._ticket.hold(len(first.data) // TOKEN_BYTES)
        async with aclosing(parts):
            async for part in parts:
                data.append(part.data)
                self._ticket.hold(len(part.data) // TOKEN_BYTES)
        await self._end(200, "ok")
        headers = {"X-Content-Type-Options": "nosniff"}
        if first.estimated:
            headers[ESTIMATED_HEADER] = ESTIMATED
        return Response(b"".join(data), media_type=first.type, headers=headers)

    async def _forwarded_events(
        self, first: ForwardedChunk, parts: AsyncGenerator[ForwardedChunk, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a forwarded stream. An error after its beginning is sent as the last event."""
        try:
            async with aclosing(parts):
                yield first.data
                async for part in parts:
                    yield part.data
            self._status, self._outcome = 200, "ok"
        except Exception as error:
            problem = problem_of(error, self.request)
            self._status, self._outcome = problem.status, outcome_of(problem.status)
            yield event(problem.told(self.request.url.path), "error")
        finally:
            await self._finish()

    async def _run(self, answer: Callable[[], Awaitable[Response]]) -> Response:
        """Admit the call and answer it; end it here unless a stream ends it later."""
        try:
            self._listed = self.service.requested(self.wanted)
            self.service.check_single(self._listed, self.request.url.path, self.wanted.tenant)
            if not self._listed.stands_for:
                self._metrics = self.service.metrics.of(self.wanted.model)
            if self.service.draining:
                raise ApiError(503, "the server is shutting down", None, "shutting_down", 5.0)
            self._ticket.admit()
            self.service.live[self.wanted.id] = self
            return await answer()
        except ClientGoneError:
            await self._end(GONE, "aborted")
            return Response(status_code=GONE)
        except asyncio.CancelledError:
            await self._end(GONE, "aborted")
            raise
        except Exception as error:
            problem = problem_of(error, self.request)
            await self._end(problem.status, outcome_of(problem.status))
            return problem.response(self.request.url.path)

    async def cancel(self) -> None:
        """End the call from outside; its client gets the answer so far."""
        if self.wanted.pooling is not None or self.wanted.questions:
            raise ApiError(
                409,
                "embeddings and decisions cannot be ended halfway; they are done within seconds",
                None,
                "not_cancellable",
            )
        self._cancelled = True
        if self._forwarded is not None:
            await self._forwarded.aclose()
        await self.service.engine.cancel(self.wanted.id)

    @property
    def name(self) -> str:
        """The id by which the client knows the answer."""
        return self._known_as or self.wanted.id

    @property
    def metrics(self) -> CallMetrics:
        """The metrics of the model that answers. To be read once that is known."""
        assert self._metrics is not None
        return self._metrics

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        if self._answers is not None:
            return self._answers.usage
        if self._forwarded is not None:
            return self._forwarded.usage
        if self._counted is not None:
            return self._counted
        return TokenUsage(self._prepared.prompt_tokens if self._prepared else 0)

    async def _at_once(self, answer: Coroutine[Any, Any, Response]) -> Response:
        made = await unless_gone(self.request.receive, answer)
        await self._end(200, "ok")
        return made

    async def _stream(self, shape: ResponseWriter) -> Response:
        keep_alive = self.service.admission.limits.keep_alive if shape.media_type == EVENTS else 0.0
        rest = self._rest = self._pieces()
        first = self._first = asyncio.ensure_future(anext(rest, Piece(0)))
        await unless_gone(self.request.receive, asyncio.wait((first,), timeout=keep_alive or None))
        if first.done():
            first.result()
        return EventStream(self._events(shape, first, rest), self._finish, keep_alive, shape.media_type)

    async def _tokens(self) -> Prepared:
        """Return the request as tokens. Fields that change nothing are named, or rejected where the server is
        strict.
        """
        prepared = self._prepared = await self.service.engine.prepare(self.wanted)
        if self._metrics is None:
            self._answered_by(prepared.request.model)
        if prepared.ignored:
            ignore(own_names(self.request, prepared.ignored))
        if self._cancelled:
            raise ended()
        return prepared

    def _name_ignored(self, header: str) -> None:
        """Name the fields that an upstream ignored in the answer's header, too, as the client calls them."""
        if header and was_turned(self.request):
            header = ", ".join(own_names(self.request, header.split(", ")))
        if header:
            names_of(self.request).add_header(header)

    def _answered_by(self, model: str) -> None:
        """Name the chosen model in the answer, the audit log and the metrics from now on."""
        self.wanted = replace(self.wanted, model=model)
        self._metrics = self.service.metrics.of(model)
        if self._shape is not None:
            self._shape.model_is(model)

    async def _prepare(self) -> Prepared:
        """Tokenize the request and charge its tokens."""
        prepared = await self._tokens()
        await self._ticket.charge(prepared)
        self.metrics.prompt_length.observe(prepared.prompt_tokens)
        return prepared

    async def _instead(self, error: EngineError) -> Prepared:
        """Return the request for the other model, where the requested name stands for several and the chosen
        one failed before its first token. Raises `error` where no other model can answer.
        """
        asked = self._listed
        if asked is None or not asked.stands_for or self.wanted.without:
            raise error
        self.wanted = replace(self.wanted, model=asked.id, without=self.wanted.model)
        try:
            prepared = await self._tokens()
        except EngineError:
            self.wanted = replace(self.wanted, model=self.wanted.without)
            raise error from None
        self._answered_by(prepared.request.model)
        return prepared

    async def _vectors(
        self, shape: EmbeddingShape, told: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Response:
        found = await self.service.engine.embed(await self._prepare())
        self._counted = TokenUsage(found.tokens)
        self._name_ignored(found.ignored)
        return await json_response(told(shape.whole(found)), sum(map(len, found.vectors)))

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        """Prepare and submit the request, and observe its pieces."""
        prepared, begun = await self._prepare(), False
        self.times.submitted = time.monotonic()
        while not begun:
            answers = self._answers = await self.service.engine.submit(prepared)
            if self._cancelled:
                await self.service.engine.cancel(self.wanted.id)
            try:
                async with aclosing(answers.pieces()) as pieces:
                    async for piece in pieces:
                        if not begun:
                            begun = True
                            self._name_ignored(answers.ignored)
                        self._watch(piece)
                        yield piece
                return
            except EngineError as error:
                if begun:
                    raise
                prepared = await self._instead(error)

    async def _whole(self, shape: ResponseWriter) -> Response:
        made: list[Piece] = []
        weight, size = answer_weight(self.wanted), 0
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                made.append(piece)
                self._ticket.hold(piece.tokens * weight)
                size += max(piece.tokens, len(piece.logprobs)) * weight
        return await json_response(shape.whole(made, self.usage), size)

    async def _events(
        self, shape: ResponseWriter, first: asyncio.Future[Piece], rest: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream. An error after its beginning is sent as the last event."""
        try:
            async with aclosing(rest):
                piece = await first
                for data in shape.begin(self.usage):
                    yield data
                for data in shape.piece(piece, self.usage):
                    yield data
                async for piece in rest:
                    for data in shape.piece(piece, self.usage):
                        yield data
            *events, last = shape.end(self.usage)
            for data in events:
                yield data
            self._status, self._outcome = 200, "ok"
            await self._finish()
            yield last
        except Exception as error:
            problem = problem_of(error, self.request)
            self._status, self._outcome = problem.status, outcome_of(problem.status)
            await self._finish()
            for data in shape.failed(problem):
                yield data

    async def _finish(self) -> None:
        """End the call of a stream, whether its events were sent or not."""
        await self._end(self._status, self._outcome)

    def _watch(self, piece: Piece) -> None:
        metrics, times, now = self.metrics, self.times, time.monotonic()
        if isinstance(piece, Passed) and piece.id and not self._known_as:
            self._known_as = piece.id
            self.service.live.setdefault(piece.id, self)
        if piece.tokens:
            if not times.first:
                times.first = now
                metrics.first_token.observe(now - times.started)
                self._span.add_event("first token")
            elif self.wanted.choices == 1:
                metrics.between.observe((now - times.last) / piece.tokens)
            times.last = now
        elif piece.finish is not None and times.first:  # an upstream tells the end after the last token
            times.last = now
        if piece.finish is not None:
            metrics.finished(piece.finish)
        if self._said is not None:
            self._said.add(piece)

    async def _end(self, status: int, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        usage, service = self.usage, self.service
        for name in (self.wanted.id, self._known_as):
            if service.live.get(name) is self:
                del service.live[name]
        self._ticket.leave(usage.completion, usage.prompt)
        seconds = self.times.total
        if self._metrics is None:
            service.metrics.unanswered(outcome, "" if self._listed is None else self._listed.id)
        else:
            self._measure(self._metrics, outcome, usage, seconds)
        self._trace(status, usage)
        if service.audit is not None:
            service.audit.write(self._entry(status, outcome, usage, seconds))
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait((self._first,))
        if self._rest is not None:
            await self._rest.aclose()
        if self._answers is not None:
            await self._answers.aclose()
        if self._forwarded is not None:
            await self._forwarded.aclose()

    def _measure(self, metrics: CallMetrics, outcome: str, usage: TokenUsage, seconds: float) -> None:
        """Count what the request has used, however it ended."""
        metrics.outcome(outcome)
        if outcome == "ok":
            metrics.whole.observe(seconds)
            metrics.answer_length.observe(usage.completion)
        phases: dict[str, float] = {}
        if self.times.first:
            phases["decode"] = self.times.decode
            metrics.decode.observe(phases["decode"])
            if usage.queued is not None:
                phases["queue"] = usage.queued
                phases["prefill"] = self.times.prefill(usage.queued)
                metrics.queued.observe(phases["queue"])
                metrics.prefill.observe(phases["prefill"])
        told = self._forwarded is not None and self._forwarded.told
        if usage.completion or self._counted is not None or told:
            key = self.wanted.tenant.name if self.service.names_keys() else ""
            metrics.used(key, usage, phases)

    def _trace(self, status: int, usage: TokenUsage) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if self._metrics is not None:
            self._span.set_attribute("gen_ai.response.model", self.wanted.model)
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion)
        self._span.end()

    def _entry(self, status: int, outcome: str, usage: TokenUsage, seconds: float) -> AuditEntry:
        prompt = self.wanted.body if self._forwarded is not None else self.wanted.texts
        text = {} if self._said is None else {"prompt": prompt, **self._said.fields()}
        return AuditEntry(
            request_id=self.request.state.request_id,
            key=self.wanted.tenant.name,
            endpoint=self.request.url.path,
            model=self.wanted.model,
            status=status,
            outcome=outcome,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            seconds=round(seconds, 4),
            **text,
        )
