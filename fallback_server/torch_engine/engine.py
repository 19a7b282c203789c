"""The loop of the worker process: schedule, step, sample, emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.errors import RequestError
from nearfar.fallback_server.backend import (
    BackendEvent,
    BackendInfo,
    EmbedRequest,
    FinishReason,
    PromptLogprob,
    TokenRequest,
)
from nearfar.fallback_server.grammars import CompiledGrammars, TokenConstraint
from nearfar.fallback_server.grammars.constraint import follow
from nearfar.fallback_server.torch_engine import sampling
from nearfar.fallback_server.torch_engine.cache import Batch, KVCache, build_batch
from nearfar.fallback_server.torch_engine.graphs import DecodeGraphs
from nearfar.fallback_server.torch_engine.messages import (
    BEAT,
    Beat,
    Cancel,
    Counters,
    Embedded,
    EmbedSequence,
    Forget,
    FromWorker,
    Learn,
    RefusedRequest,
    Started,
    Stepped,
    Submit,
)
from nearfar.fallback_server.torch_engine.model import PagedModel
from nearfar.fallback_server.torch_engine.options import TorchOptions
from nearfar.fallback_server.torch_engine.scheduler import BatchLimits, Work, WorkChunk, WorkScheduler

BUDGET = {"cpu": 256, "cuda": 2048}
ONE_THREAD = 25_000_000
"""Weights times rows of a step below which one CPU thread computes it alone. With little work each, threads
wait for each other at each operation: a model of 2 million weights is as fast with one (2.7 ms a token), and
20 times as fast when another process is busy (2 cores).
"""


@dataclass(frozen=True)
class LoadedGrammar:
    """Result of loading a request's grammar in the loader's thread: the grammar, or an error."""

    id: str
    result: Any  # an xgrammar.CompiledGrammar or a RequestError


@dataclass(eq=False)
class Pooled:
    """An embedding under way. `total`: the sum of the hidden states of the rows computed so far."""

    request: EmbedRequest
    work: Work
    started: bool = False
    total: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, start: int) -> None:
        """Add the hidden states of the next rows, float32 [N, hidden]. `start` is the position of the
        first.
        """
        if self.request.pooling == "last":
            self.total = hidden[-1]
        # these are the first rows, or the first ones after the work's pages were given up
        elif start == 0 or self.total is None:
            self.total = hidden.sum(0)
        else:
            self.total = self.total + hidden.sum(0)

    @property
    def vector(self) -> Vector:
        """The embedding, once all rows are in: the last hidden state for "last", else the mean."""
        assert self.total is not None
        count = 1 if self.request.pooling == "last" else len(self.work.tokens)
        values: Vector = (self.total / count).cpu().numpy()
        return values


@dataclass(eq=False)
class Active:
    """A request under way."""

    request: TokenRequest
    work: Work
    state: sampling.RowState
    limit: int  # the most tokens in all, prompt included
    constraint: TokenConstraint | None = None
    started: bool = False
    emitted: bool = False
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


class TorchEngine:
    """One model, its cache, and the requests under way. All methods are called from one thread."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        path: Path,
        options: TorchOptions,
        emit: Callable[[FromWorker], None],
        post: Callable[[LoadedGrammar], None],
    ) -> None:
        self.model = model
        self.cache = cache
        self._emit = emit
        self._post = post
        self._last_word = time.monotonic()
        graphs = model.device.type == "cuda" and options.cuda_graphs
        self._graphs = DecodeGraphs(model, cache, capture=True) if graphs else None
        budget = max(options.token_budget or BUDGET[model.device.type], options.max_running)
        table = SequenceTable(cache.pages, cache.page_size, options.max_running)
        limits = BatchLimits(
            options.max_running, budget, options.ageing, sampling.prompt_rows(model.facts.vocab_size)
        )
        self.scheduler = WorkScheduler(table, limits)
        # The server's process decides which grammars are kept.
        self._grammars = CompiledGrammars(
            path, model.facts.vocab_size, model.facts.eos_token_ids, kept_bytes=1 << 62
        )
        self._unusable: dict[str, RequestError] = {}
        self._loader = ThreadPoolExecutor(
            1, "grammars"
        )  # a single thread, so that a learnt grammar is ready when a request names it
        self._loader.submit(self._grammars.warm)
        self._loading: dict[str, Active] = {}
        self._threads, self._weights = torch.get_num_threads(), model.weights
        self._kept_bytes: int = model.nbytes + cache.nbytes
        self._active: dict[str, Active] = {}
        self._pooled: dict[str, Pooled] = {}
        self._generated = self._prompted = self._steps = 0
        tokens = cache.pages * cache.page_size
        self.info = BackendInfo(
            model.facts.name,
            model.facts.vocab_size,
            min(model.facts.context_length, tokens),
            model.facts.eos_token_ids,
            options.max_running,
            tokens,
            model.facts.sampling,
        )

    @property
    def busy(self) -> bool:
        """Whether `turn` has something to do."""
        return bool(len(self.scheduler))

    @property
    def counters(self) -> Counters:
        """The current figures."""
        scheduler = self.scheduler
        return Counters(
            len(scheduler.running),
            len(scheduler.waiting) + len(self._loading),
            1.0 - scheduler.table.available / self.cache.pages,
            scheduler.prefix_hits,
            scheduler.prefix_queries,
            scheduler.preemptions,
            self._generated,
            self._prompted,
            self._steps,
            self._memory,
        )

    @property
    def _memory(self) -> int:
        """Bytes of the device's memory in use: on a CPU, of weights and KV cache."""
        if self.model.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.model.device))
        return self._kept_bytes

    def handle(self, message: Learn | Forget | Submit | Cancel | EmbedSequence | LoadedGrammar) -> None:
        """Process a message; computes nothing yet."""
        match message:
            case Learn(key, compiled):
                self._loader.submit(self._learn, key, compiled)
            case Forget(key):
                self._loader.submit(self._forget, key)
            case Submit(request, grammar):
                self._submit(request, grammar)
            case Cancel(request_id):
                self._cancel(request_id)
            case EmbedSequence(request):
                self._pool(request)
            case LoadedGrammar(request_id, result):
                self._loaded(request_id, result)

    def turn(self) -> None:
        """Run one step."""
        planned = self.scheduler.schedule()
        if planned:
            self._announce(planned)
            with torch.inference_mode():
                self._step(build_batch(self.cache, planned, self.pulse))
        self.pulse()

    def pulse(self) -> None:
        """Send a heartbeat if no message was sent for a while."""
        if time.monotonic() - self._last_word >= BEAT:
            self._say(Beat(self.counters))

    def close(self) -> None:
        """Stop the loader's thread."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _say(self, message: FromWorker) -> None:
        self._last_word = time.monotonic()
        self._emit(message)

    def _submit(self, request: TokenRequest, grammar: str | None) -> None:
        assert request.sampling.seed is not None
        work = Work(
            request.id,
            list(request.tokens),
            request.priority,
            time.monotonic() + request.late,
            salt=request.salt,
            whole=request.prompt_logprobs is not None,
            whole_from=max(request.prompt_logprobs_from - 1, 0),
        )
        state = sampling.prepare(
            request.sampling,
            request.sampling.seed,
            request.tokens,
            self.model.facts.vocab_size,
            self.model.device,
            logprobs=request.logprobs,
        )
        active = Active(
            request, work, state, min(len(request.tokens) + request.max_tokens, self.info.context_length)
        )
        if grammar is None:
            if request.min_tokens:
                active.constraint = self._constraint(request, None)
            self._begin(active)
        else:
            self._loading[request.id] = active
            self._loader.submit(self._find, request.id, grammar)

    def _pool(self, request: EmbedRequest) -> None:
        work = Work(
            request.id,
            list(request.tokens),
            request.priority,
            time.monotonic() + request.late,
            salt=request.salt,
            pooled=request.pooling != "last",
        )
        self._pooled[request.id] = Pooled(request, work)
        self.scheduler.add(work)

    def _learn(self, key: str, compiled: str) -> None:
        """Load a grammar, in the loader's thread: reading a large one takes longer than a step may wait."""
        try:
            self._grammars.load(key, compiled)
        except RequestError as error:
            self._unusable[key] = error
        except Exception as error:  # a bug in this code must not leave requests waiting
            self._unusable[key] = RequestError(f"the grammar cannot be read: {error!r}", "response_format")

    def _forget(self, key: str) -> None:
        """Drop a grammar, in the loader's thread."""
        self._grammars.forget(key)
        self._unusable.pop(key, None)

    def _find(self, request_id: str, key: str) -> None:
        """Look up a request's grammar and post the result, in the loader's thread."""
        unknown = RequestError("the grammar was not sent; this is a fault of the server", "response_format")
        self._post(LoadedGrammar(request_id, self._grammars.known(key) or self._unusable.get(key, unknown)))

    def _loaded(self, request_id: str, result: Any) -> None:
        active = self._loading.pop(request_id, None)
        if active is None:
            return  # the work was cancelled meanwhile
        if not isinstance(result, RequestError):
            try:
                active.constraint = self._constraint(
                    active.request, follow(result, active.request.stop_token_ids)
                )
            except (RuntimeError, ValueError) as error:
                result = RequestError(f"the grammar cannot be followed: {error}", "response_format")
        if isinstance(result, RequestError):
            self._say(RefusedRequest(request_id, str(result), result.param))
        else:
            self._begin(active)

    def _constraint(self, request: TokenRequest, matcher: Any | None) -> TokenConstraint:
        vocab = self.model.facts.vocab_size
        return TokenConstraint(
            matcher, vocab, request.stop_token_ids, request.min_tokens, request.held_token_ids
        )

    def _begin(self, active: Active) -> None:
        self._active[active.request.id] = active
        self.scheduler.add(active.work)

    def _cancel(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        found = self._active.pop(request_id, None) or self._pooled.pop(request_id, None)
        if found is not None:
            self.scheduler.remove(found.work)

    def _announce(self, planned: list[WorkChunk]) -> None:
        ids = [chunk.work.id for chunk in planned]
        fresh = [made for name in ids if not (made := self._pooled.get(name) or self._active[name]).started]
        if fresh:
            for made in fresh:
                made.started = True
            self._say(Started(tuple(made.request.id for made in fresh)))

    def _step(self, batch: Batch) -> None:
        """Run the rows, sample where a chunk ends its prompt, send the events."""
        wanted: list[int] = []
        spans: list[tuple[int, int]] = []  # the rows of each chunk in the logits
        pooled: list[tuple[WorkChunk, range]] = []
        row = 0
        for chunk in batch.chunks:
            rows = range(row, row + chunk.count)
            if chunk.work.id in self._pooled:
                pooled.append((chunk, rows))
                keep = rows[:0]
            else:
                skipped = max(chunk.work.whole_from - chunk.start, 0)
                keep = rows[skipped:] if chunk.work.whole else rows[-1:] if chunk.samples else rows[:0]
            spans.append((len(wanted), len(wanted) + len(keep)))
            wanted += keep
            row += chunk.count
        self._steps += 1
        self._prompted += sum(chunk.count for chunk in batch.chunks if chunk.start < chunk.work.prompt_length)
        rows_wanted = torch.tensor(wanted, dtype=torch.int64, device=self.model.device)
        if self.model.device.type == "cpu":
            torch.set_num_threads(1 if row * self._weights < ONE_THREAD else self._threads)
        if pooled:
            logits, hidden = self.model.forward_hidden(batch, rows_wanted)
            self._add_hidden(pooled, hidden)
        elif self._graphs is not None and self._graphs.fits(batch):
            logits = self._graphs.run(batch)[rows_wanted]
        else:
            logits = self.model.forward(batch, rows_wanted)
        for chunk, span in zip(batch.chunks, spans, strict=True):
            if chunk.work.whole:
                self._prompt_logprobs(chunk, logits[slice(*span)])
        ending = [
            (chunk, last - 1)
            for chunk, (first, last) in zip(batch.chunks, spans, strict=True)
            if chunk.samples and first < last
        ]
        if len(ending) != len(wanted):
            logits = logits[
                torch.tensor([index for _, index in ending], dtype=torch.int64, device=logits.device)
            ]
        self._emit_tokens([self._active[chunk.work.id] for chunk, _ in ending], logits)

    def _prompt_logprobs(self, chunk: WorkChunk, logits: torch.Tensor) -> None:
        active, first = self._active[chunk.work.id], chunk.work.whole_from
        if chunk.start <= first:
            active.prompt_logprobs = [] if active.request.prompt_logprobs_from else [None]
        targets = chunk.work.tokens[
            max(chunk.start, first) + 1 : min(chunk.start + chunk.count + 1, chunk.work.prompt_length)
        ]
        active.prompt_logprobs += sampling.logprobs_of(
            logits[: len(targets)], targets, active.request.prompt_logprobs or 0
        )

    def _emit_tokens(self, actives: list[Active], logits: torch.Tensor) -> None:
        events: list[tuple[str, BackendEvent]] = []
        if actives:
            rows = [sampling.RowInput(a.state, len(a.work.tokens), _allowed(a.constraint)) for a in actives]
            choices = sampling.sample(logits, rows)
            for active, choice in zip(actives, choices, strict=True):
                events += [(active.request.id, event) for event in self._advance(active, choice)]
        self._say(Stepped(tuple(events), self.counters))

    def _advance(self, active: Active, choice: sampling.SampledToken) -> list[BackendEvent]:
        """Append the token to the request; a request that ends is removed."""
        work, constraint = active.work, active.constraint
        if constraint is not None and choice.token is not None and not constraint.accept(choice.token):
            self._remove(active)
            message = "the grammar allows no token here, or takes too long to follow; make it simpler"
            self._say(RefusedRequest(active.request.id, message, "response_format"))
            return []
        finish = self._finish(active, choice)
        cached, prompt = 0, None
        if not active.emitted:
            active.emitted = True
            cached = work.cached or 0
            prompt = tuple(active.prompt_logprobs) if work.whole else None
            work.whole, active.prompt_logprobs = False, []
        if choice.token is not None:
            work.tokens.append(choice.token)
            self._generated += 1
        events = [BackendEvent(choice.token, finish, choice.logprob, choice.top, prompt, cached)]
        if finish is not None:
            self._remove(active)
        return events

    def _remove(self, active: Active) -> None:
        del self._active[active.request.id]
        self.scheduler.remove(active.work)

    def _finish(self, active: Active, choice: sampling.SampledToken) -> FinishReason | None:
        """Why the answer ends with this token; None if it does not."""
        if choice.token is None:
            return "abort" if choice.broken else "stop"
        if choice.token in active.request.stop_token_ids:
            return "stop"
        return "length" if len(active.work.tokens) + 1 >= active.limit else None

    def _add_hidden(self, pooled: list[tuple[WorkChunk, range]], hidden: torch.Tensor) -> None:
        """Add the hidden states of a step to the embeddings, and send the complete ones."""
        for chunk, rows in pooled:
            found = self._pooled[chunk.work.id]
            found.add(hidden[rows.start : rows.stop].float(), chunk.start)
            if chunk.samples:
                del self._pooled[chunk.work.id]
                self.scheduler.remove(chunk.work)
                self._say(Embedded(found.request.id, found.vector))


def _allowed(constraint: TokenConstraint | None) -> torch.Tensor | None:
    """The grammar's bitmask, int32 [ceil(vocab / 32)]; None without a grammar."""
    return None if constraint is None else torch.from_numpy(constraint.allowed().view(np.int32))
