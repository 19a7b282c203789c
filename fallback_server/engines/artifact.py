"""Token backend over the edge runtime, with which a device or a small machine serves its artifact."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Literal

from nearfar.edge_runtime.engine import requests as edge
from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.engine.generation import Generation
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scoring import prompt_scores, score
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.errors import EngineError, NearfarError, RequestError
from nearfar.fallback_server.backend import (
    BackendEvent,
    BackendInfo,
    BackendStats,
    EmbedRequest,
    LabelScores,
    PromptLogprob,
    RunningProgram,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.grammars import GrammarService, TokenConstraint
from nearfar.fallback_server.token_stream import TaskStream, TaskStreams, check_room

log = logging.getLogger(__name__)

FRESH = 5.0
"""Seconds for which a finished step proves that the engine lives, and seconds that a probe may take. On a
device with long steps, twice the last step's time counts: no token comes while a long prompt is read.
"""
PRIORITY_SECONDS = 1.0
"""Seconds of waiting that one step of priority is worth. So a waiting request cannot be overtaken for ever.
"""


@dataclass
class _Counts:
    """Figures since the start."""

    prompt: int = 0
    generated: int = 0
    hits: int = 0
    embedded: int = 0
    """Tokens of inputs to embed and to score, which the figures of the prefix cache leave out."""


@dataclass(order=True)
class _Place:
    """A place in the queue; `order` is the time of arrival, moved by the priority."""

    order: float
    number: int
    turn: asyncio.Future[None] = field(compare=False)


class ArtifactBackend:
    """Runs requests through an EngineCore, as many at once as it has logits rows; the others wait here by
    priority.
    """

    def __init__(
        self, core: EngineCore, grammars: GrammarService | None = None, *, max_waiting: int = 256
    ) -> None:
        model, table = core.manifest.model, core.scheduler.table
        self.core = core
        self.info = BackendInfo(
            model=model.name,
            vocab_size=model.vocab_size,
            context_length=core.context,
            eos_token_ids=tuple(model.eos_token_ids),
            max_running=core.scheduler.limits.max_logits,
            cache_tokens=table.available * table.page_size,
            sampling=core.manifest.sampling,
        )
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._line: list[_Place] = []
        self._numbers = itertools.count()
        self._streams = TaskStreams()
        self._running = 0
        self._aside = 0
        self._pages = table.available
        self._counts = _Counts()
        self._probe: asyncio.Task[bool] | None = None

    def submit(self, request: TokenRequest) -> AsyncIterator[BackendEvent]:
        """Start a request. See Backend."""
        self._streams.check_new(request.id)
        params = _params(request)
        params.check_vocabulary(self.info.vocab_size)
        self._check(request)
        self._check_room()
        return self._streams.start(request.id, lambda stream: self._run(request, params, stream))

    async def cancel(self, request_id: str) -> None:
        """End a request."""
        await self._streams.cancel(request_id)

    async def embed(self, request: EmbedRequest) -> Vector:
        """Return an embedding model's vector, pooled by the last token. Raises RequestError for mean
        pooling.
        """
        if request.pooling == "mean":
            raise RequestError(
                "an artifact pools by the last token, not by the mean: leave it out", "pooling"
            )
        self.core.check_embeds([request.tokens])
        self._check_room()
        self._aside += 1
        try:
            await self._turn(request.late + request.priority * PRIORITY_SECONDS)
            try:
                [vector] = await self.core.embed_checked([request.tokens], request.salt)
            finally:
                self._leave()
        finally:
            self._aside -= 1
        self._counts.embedded += len(request.tokens)
        return vector

    async def score(self, request: ScoreRequest) -> LabelScores:
        """Return the log-probabilities of labels after a prompt. See Backend."""
        self.core.check_scores(request.tokens, request.labels)
        self._check_room()
        self._aside += 1
        try:
            await self._turn(request.late + request.priority * PRIORITY_SECONDS)
            try:
                found = await score(self.core, request.tokens, request.labels, request.salt)
            finally:
                self._leave()
        finally:
            self._aside -= 1
        self._counts.embedded += len(request.tokens) + sum(map(len, request.labels))
        return found

    def stats(self) -> BackendStats:
        """Return the engine's current figures."""
        table, counts = self.core.scheduler.table, self._counts
        return BackendStats(
            running=self._running,
            waiting=self._waiting,
            cache_usage=1 - table.available / self._pages,
            prefix_hits=counts.hits,
            prefix_queries=counts.prompt,
            preemptions=self.core.scheduler.preemptions,
            generated_tokens=counts.generated,
            prompt_tokens=counts.prompt + counts.embedded,
            steps=self.core.steps,
            restarts=0,
            program=self._program(),
            memory=self.core.executor.memory_used(),
        )

    def _program(self) -> RunningProgram:
        executor, choice = self.core.executor, self.core.choice
        timed = choice.seconds if choice else {}
        seconds = {name: {str(kind): took for kind, took in steps.items()} for name, steps in timed.items()}
        why, core = choice.why if choice else "", self.core
        return RunningProgram(
            executor.name, executor.program_name, why, seconds, core.largest_step, core.largest_bucket
        )

    async def alive(self) -> bool:
        """Whether a step was finished lately, or a probe generates a token within FRESH seconds."""
        if time.monotonic() - self.core.last_read < max(FRESH, 2 * self.core.step_seconds):
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one())
        done, _ = await asyncio.wait([self._probe], timeout=FRESH)
        return bool(done) and self._probe.result()

    async def close(self, drain: float = 0.0) -> None:
        """Wait at most `drain` seconds for requests under way, then stop."""
        await self._streams.close(drain)
        others = () if self._grammars is None else (self._grammars.close(),)
        await asyncio.gather(self.core.close(), *others)

    @property
    def _waiting(self) -> int:
        """Sequences to complete, to embed or to score that do not run yet."""
        return len(self._streams) + self._aside - self._running

    def _check_room(self) -> None:
        check_room(self._waiting, self._max_waiting)

    def _check(self, request: TokenRequest) -> None:
        if not request.tokens:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        vocab = self.info.vocab_size
        wrong = edge.outside(request.tokens, vocab)
        if wrong is not None:
            raise RequestError(
                f"token id {request.tokens[wrong]} is outside the vocabulary of {vocab} tokens", "prompt"
            )
        self.core.scheduler.limit_tokens(request.tokens, request.max_tokens)
        if request.grammar is not None and self._grammars is None:
            raise RequestError(
                "this server was started without grammars; install xgrammar", "response_format"
            )

    async def _run(self, request: TokenRequest, params: SamplingParams, stream: TaskStream) -> None:
        """Run one request from its place in the queue to its last token."""
        try:
            submitted = time.monotonic()
            constraint = await self._constraint(request)
            await self._turn(request.late + request.priority * PRIORITY_SECONDS)
            try:
                queued = time.monotonic() - submitted
                prompt = await self._prompt_logprobs(request)
                generation = self.core.generate(request.tokens, params, constraint, request.salt)
                await self._generate(generation, request, stream, queued, prompt)
            finally:
                self._leave()
        except RequestError as error:
            stream.put(error)
        except NearfarError as error:
            stream.put(EngineError(str(error)))
        except Exception as error:  # a bug in this code must not leave the reader waiting
            log.exception("request %s failed", request.id)
            stream.put(EngineError(f"the engine failed: {type(error).__name__}: {error}"))

    async def _prompt_logprobs(self, request: TokenRequest) -> tuple[PromptLogprob, ...] | None:
        """The log-probabilities of the prompt's tokens, if the request wants them."""
        most = request.prompt_logprobs
        if most is None:
            return None
        first = max(request.prompt_logprobs_from, 1)
        found = await prompt_scores(self.core, request.tokens, first, request.salt)
        entries = [
            (edge.Logprob(token, row.logprobs[0]), tuple(map(edge.Logprob, row.likeliest[:most], row.top)))
            for token, row in zip(request.tokens[first:], found, strict=True)
        ]
        return (*entries,) if request.prompt_logprobs_from else (None, *entries)

    async def _generate(
        self,
        generation: Generation,
        request: TokenRequest,
        stream: TaskStream,
        queued: float,
        prompt: tuple[PromptLogprob, ...] | None,
    ) -> None:
        first = True
        try:
            async for event in generation:
                # A prompt whose tokens were scored has been computed for this request.
                cached = generation.stats.cached_tokens if first and prompt is None else 0
                self._counts.prompt += len(request.tokens) if first else 0
                self._counts.hits += cached
                self._counts.generated += 1
                made = _event(event, request, cached)
                stream.put(replace(made, prompt_logprobs=prompt, queued=queued) if first else made)
                first = False
                if made.finish is not None:
                    return
        finally:
            await generation.aclose()

    async def _constraint(self, request: TokenRequest) -> TokenConstraint | None:
        if request.grammar is None and not request.min_tokens:
            return None
        matcher, vocab = None, self.info.vocab_size
        stops = frozenset(token for token in request.stop_token_ids if token < vocab)
        if request.grammar is not None and self._grammars is not None:
            matcher = await self._grammars.matcher(request.grammar, stops)
        return TokenConstraint(matcher, vocab, stops, request.min_tokens, request.held_token_ids)

    async def _turn(self, late: float) -> None:
        """Wait for a free place, queued as if the request had arrived `late` seconds later."""
        if self._running < self.info.max_running and not self._line:
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        place = _Place(time.monotonic() + late, next(self._numbers), turn)
        heapq.heappush(self._line, place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn was granted at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        """Give the free place to the next in the queue."""
        self._running -= 1
        while self._line and self._running < self.info.max_running:
            turn = heapq.heappop(self._line).turn
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    async def _generate_one(self) -> bool:
        try:
            if self.core.manifest.model.task == "embed":
                await self.core.embed_all([[0]])
                return True
            generation = self.core.generate([0], SamplingParams(max_tokens=1, temperature=0.0))
            async for _ in generation:
                pass
        except NearfarError:
            return False
        return True


def _params(request: TokenRequest) -> SamplingParams:
    """Convert to the edge runtime's parameters, whose checks reject values out of range. End tokens are
    handled here, not there.
    """
    return SamplingParams(
        **vars(request.sampling),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        ignore_eos=True,
    )


def _event(event: edge.TokenEvent, request: TokenRequest, cached: int) -> BackendEvent:
    finish: Literal["stop", "length"] | None = (
        "stop" if event.token in request.stop_token_ids else event.finish_reason
    )
    return BackendEvent(event.token, finish, event.logprob, event.top_logprobs, None, cached)
