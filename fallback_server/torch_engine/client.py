"""The torch engine as a backend in the server's process, in front of a worker process."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nearfar.edge_runtime.grammars import BoundedCache, Grammar, key_of
from nearfar.edge_runtime.openai.embeddings import Vector
from nearfar.errors import (
    CheckpointError,
    DeviceError,
    EngineError,
    NearfarError,
    OverloadError,
    RequestError,
)
from nearfar.fallback_server.backend import (
    BackendEvent,
    BackendInfo,
    BackendStats,
    EmbedRequest,
    LabelScores,
    Sampling,
    ScoreRequest,
    TokenRequest,
)
from nearfar.fallback_server.grammars import GrammarService
from nearfar.fallback_server.scoring import score_by_prompts
from nearfar.fallback_server.token_stream import BackendStream, Unread, check_new, check_room
from nearfar.fallback_server.torch_engine.messages import (
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
from nearfar.fallback_server.torch_engine.options import TorchOptions, require_checkpoint
from nearfar.fallback_server.torch_engine.process import WorkerProcess
from nearfar.fallback_server.torch_engine.requests import MAX_PRIORITY, check_tokens, checked

SILENCE = 3.0  # seconds without a message after which the engine is not called alive
NOT_FINITE = (
    "the logits of this request are not finite numbers, so no token can be chosen: the model overflows in "
    "the type that it computes in. Serve it with --dtype float32; if it runs so already, report the model "
    "and the prompt"
)
STARTS = 3  # failed starts in a row after which waiting requests are told
LEARNT_BYTES = 256 << 20  # bytes of compiled grammars that the worker is told to keep
SUMMED = ("prefix_hits", "prefix_queries", "preemptions", "generated_tokens", "prompt_tokens", "steps")


class TokenStream(BackendStream):
    """The events of one request. `aclose` cancels it."""

    def __init__(self, backend: TorchBackend, request: TokenRequest) -> None:
        super().__init__(backend.unread)
        self.request = request
        self.message: Submit | None = None  # None while its grammar is being compiled
        self.compiled: str | None = None  # the same text for all requests of one grammar
        self.compiling: asyncio.Task[None] | None = None
        self.started = False  # the request has been part of a step
        self.submitted = time.monotonic()
        self.queued: float | None = None  # seconds until the request was part of a step
        self.emitted = False
        self.deaths = 0  # engine processes that died while they computed the request
        self.done = False
        self._backend = backend

    async def aclose(self) -> None:
        """End the request if it is still under way; iterating gives nothing more."""
        self.leave()
        await self._backend.cancel(self.request.id)

    def fail(self, error: NearfarError) -> None:
        """End the stream with an error (see BackendStream). It replaces the end of a complete but unread
        answer.
        """
        self.done = False
        super().fail(error)
        self._backend.forget(self)

    def put(self, event: BackendEvent | NearfarError) -> None:
        """Append an event for the reader; the last event closes the stream."""
        if not self.done:
            if not self.emitted and isinstance(event, BackendEvent):
                event = replace(event, queued=self.queued)
            self.emitted = True
            self.done = isinstance(event, NearfarError) or event.finish is not None
            super().put(event)


@dataclass(eq=False)
class _EmbedJob:
    """A sequence to embed. `deaths` counts the engines that died before it was done. `started`: it has been
    part of a step.
    """

    message: EmbedSequence
    future: asyncio.Future[Vector]
    deaths: int = 0
    started: bool = False

    def fail(self, error: EngineError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class TorchBackend:
    """A Hugging Face model in its own process, which is started again when it dies or hangs."""

    def __init__(self, path: Path, options: TorchOptions, worker: WorkerProcess) -> None:
        self.info: BackendInfo = worker.info
        self.options = options
        self._path = path
        self._worker: WorkerProcess | None = worker
        self._grammars = GrammarService(
            path, worker.info.vocab_size, worker.info.eos_token_ids, timeout=options.grammar_seconds
        )
        self._grammars.start(here=False)
        # the grammars that this worker keeps, as it was told
        self._learnt: BoundedCache[str, None] = BoundedCache(LEARNT_BYTES)
        self._streams: dict[str, TokenStream] = {}
        self.unread = Unread()
        self._embeds: dict[str, _EmbedJob] = {}
        self._counters = Counters()
        self._before = dict.fromkeys(SUMMED, 0)  # the counters of ended workers
        self._restarts = 0
        self._last_step = 0.0
        self._failed_starts = 0
        self._closing = False
        self._ids = itertools.count()
        self._probe: asyncio.Task[bool] | None = None
        self._tasks = [asyncio.create_task(self._serve(worker)), asyncio.create_task(self._watch())]

    @classmethod
    async def load(cls, path: str | Path, options: TorchOptions | None = None) -> TorchBackend:
        """Start the engine's process and load the checkpoint folder.

        Raises CheckpointError, DeviceError, or EngineError when the process dies on the way.
        """
        options = options or TorchOptions()
        require_checkpoint(Path(path))
        return cls(Path(path), options, await WorkerProcess.start(Path(path), options))

    @property
    def worker_pid(self) -> int | None:
        """The id of the process that the engine runs in; None between two processes."""
        return self._worker.pid if self._worker else None

    def submit(self, request: TokenRequest) -> TokenStream:
        """Start a request. Raises RequestError, or OverloadError when no more may wait."""
        request = checked(request, self.info, self.options)
        self._check_room(request.id)
        return self._submit(request)

    async def cancel(self, request_id: str) -> None:
        """End a request with an event of finish "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(BackendEvent(None, "abort"))
            self.forget(stream)

    def forget(self, stream: TokenStream) -> None:
        """Stop computing a request."""
        self._streams.pop(stream.request.id, None)
        if stream.compiling is not None:
            stream.compiling.cancel()
        if stream.message is not None:
            self._send(Cancel(stream.request.id))

    async def embed(self, request: EmbedRequest) -> Vector:
        """Return the mean of the last hidden states of a sequence, or the last one, by the request's
        pooling.
        """
        check_tokens(request.tokens, self.info, room=0)
        self._check_room(request.id)
        job = _EmbedJob(EmbedSequence(request), asyncio.get_running_loop().create_future())
        self._embeds[request.id] = job
        self._send(job.message)
        try:
            return await job.future
        finally:
            del self._embeds[request.id]
            if job.future.cancelled():  # the caller no longer waits for the grammar
                self._send(Cancel(request.id))

    async def score(self, request: ScoreRequest) -> LabelScores:
        """Return the log-probabilities of labels after a prompt. See Backend."""
        return await score_by_prompts(self, request)

    def stats(self) -> BackendStats:
        """Return the figures of the last step; counts continue over restarts."""
        now = asdict(self._counters)
        counts = {name: now[name] + self._before[name] for name in SUMMED}
        under_way = self._jobs
        started = sum(job.started for job in under_way)
        return BackendStats(
            running=now["running"],
            waiting=len(under_way) - min(started, now["running"]),
            cache_usage=now["cache_usage"],
            restarts=self._restarts,
            memory=now["memory"],
            **counts,
        )

    async def alive(self) -> bool:
        """Whether a step progressed within the last seconds, or a probe generates a token now."""
        if self._silent():
            await asyncio.sleep(0.05)  # messages that are unread because this loop was held up are read now
        if self._silent():
            return False
        if time.monotonic() - self._last_step <= self.options.alive_seconds:
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one())
        return await asyncio.shield(self._probe)

    @property
    def _jobs(self) -> list[TokenStream | _EmbedJob]:
        """All requests and embeddings that wait or are computed."""
        return [*self._streams.values(), *self._embeds.values()]

    def _check_room(self, request_id: str) -> None:
        """Raise OverloadError or RequestError for a request that cannot be taken now."""
        if self._closing:
            raise OverloadError("the engine is shutting down", 5.0)
        if self._failed_starts >= STARTS:
            raise OverloadError("the engine does not start; it is tried again", self.options.backoff_last)
        check_new(request_id, self._streams, self._embeds)
        check_room(sum(not job.started for job in self._jobs), self.options.max_waiting)

    def _silent(self) -> bool:
        return self._worker is None or time.monotonic() - self._worker.heard > SILENCE

    async def close(self, drain: float = 0.0) -> None:
        """Take no more requests, wait at most `drain` seconds for those under way, then stop."""
        self._closing = True
        deadline = time.monotonic() + drain
        while self._streams and self._worker is not None and time.monotonic() < deadline:
            await asyncio.sleep(min(0.02, drain))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        compiling = [stream.compiling for stream in self._streams.values() if stream.compiling is not None]
        self._fail_all(EngineError("the engine was shut down with the request under way"))
        for compiled in compiling:
            compiled.cancel()
        await asyncio.gather(*compiling, return_exceptions=True)
        await self._grammars.close()
        if self._worker is not None:
            await self._worker.stop()
            self._worker = None

    def _submit(self, request: TokenRequest) -> TokenStream:
        stream = self._streams[request.id] = TokenStream(self, request)
        if request.grammar is None:
            stream.message = Submit(request)
            self._start(stream)
        else:
            stream.compiling = asyncio.create_task(self._compile(stream, request.grammar))
        return stream

    async def _compile(self, stream: TokenStream, grammar: Grammar) -> None:
        """Compile a request's grammar, then send the request."""
        try:
            stream.compiled = await self._grammars.compiled(grammar)
            stream.message = Submit(replace(stream.request, grammar=None), key_of(grammar))
        except NearfarError as error:
            self._put(stream.request.id, error)
        except Exception as error:  # a bug in this code must not leave the reader waiting
            self._put(stream.request.id, EngineError(f"the grammar could not be compiled: {error!r}"))
        else:
            self._start(stream)
        finally:
            stream.compiling = None

    def _start(self, stream: TokenStream) -> None:
        """Send a request, preceded by its grammar if this worker does not have it."""
        message = stream.message
        if message is None or self._worker is None:  # otherwise the message is sent when there is a worker
            return
        if (
            message.grammar is not None
            and stream.compiled is not None
            and not self._learnt.has(message.grammar)
        ):
            self._send(Learn(message.grammar, stream.compiled))
            for key in self._learnt.put(message.grammar, None, len(stream.compiled)):
                self._send(Forget(key))
        self._send(message)

    def _send(self, message: Submit | Learn | Forget | Cancel | EmbedSequence) -> None:
        if self._worker is not None:  # otherwise the message is sent again when there is a worker
            self._worker.send(message)

    async def _generate_one(self) -> bool:
        token = self.info.eos_token_ids[0] if self.info.eos_token_ids else 0
        request = TokenRequest(
            f"probe-{next(self._ids)}", (token,), 1, Sampling(temperature=0.0), priority=-MAX_PRIORITY
        )
        stream = self._submit(checked(request, self.info, self.options))
        try:
            return (await asyncio.wait_for(anext(stream), self.options.alive_seconds)).token is not None
        except (TimeoutError, NearfarError, StopAsyncIteration):
            return False
        finally:
            await stream.aclose()

    async def _serve(self, worker: WorkerProcess) -> None:
        """Process the worker's messages; when the worker is gone, start another."""
        try:
            while True:
                while (message := await worker.receive()) is not None:
                    self._take(message)
                await self._bury(worker)
                worker = await self._restart()
        except Exception as error:  # a bug in this file must not leave callers waiting for ever
            self._closing = True
            self._fail_all(EngineError(f"the engine's client failed: {error!r}"))
            await worker.kill()
            raise

    async def _watch(self) -> None:
        """Kill a worker that is silent for too long."""
        pause = min(0.25, self.options.hang_seconds / 4)
        while True:
            slept = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            # If this loop itself was held up, messages of the worker may be unread: they are read before the
            # next check.
            worker = self._worker
            if (
                worker is not None
                and now - slept < 2 * pause
                and now - worker.heard > self.options.hang_seconds
            ):
                await worker.kill()

    def _take(self, message: FromWorker) -> None:
        match message:
            case Started(ids):
                for request_id in ids:
                    if job := self._streams.get(request_id) or self._embeds.get(request_id):
                        job.started = True
                        if isinstance(job, TokenStream) and job.queued is None:
                            job.queued = time.monotonic() - job.submitted
            case Stepped(events, counters):
                self._counters = counters
                self._last_step = time.monotonic()
                for request_id, event in events:
                    self._put(request_id, EngineError(NOT_FINITE) if event.finish == "abort" else event)
            case RefusedRequest(request_id, text, param):
                self._put(request_id, RequestError(text, param))
            case Embedded(embed_id, values):
                if (job := self._embeds.get(embed_id)) and not job.future.done():
                    job.future.set_result(values)
            case Beat(counters):
                self._counters = counters
                if counters.running:  # the sign of life comes from a layer of a long step
                    self._last_step = time.monotonic()
            case _:
                pass

    def _put(self, request_id: str, item: BackendEvent | NearfarError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(item)
            if stream.done:
                self._streams.pop(request_id, None)

    async def _bury(self, worker: WorkerProcess) -> None:
        """Fail the answers that were under way; keep requests that can start over."""
        self._worker = None
        self._last_step = 0.0
        now = asdict(self._counters)
        self._before = {name: self._before[name] + now[name] for name in SUMMED}
        self._counters = Counters()
        for stream in list(self._streams.values()):
            stream.deaths += stream.started
            if stream.emitted or stream.deaths > self.options.max_resubmits:
                self._put(stream.request.id, EngineError("the engine died while it answered the request"))
            stream.started = False
        for job in self._embeds.values():
            job.deaths += job.started
            job.started = False
            if job.deaths > self.options.max_resubmits:
                job.fail(EngineError("the engine died while it embedded the sequence"))
        await worker.kill()

    async def _restart(self) -> WorkerProcess:
        """Start workers until one is ready, then send it all waiting requests."""
        delay = self.options.backoff_first
        while True:
            await asyncio.sleep(delay)
            try:
                worker = await WorkerProcess.start(self._path, self.options)
                break
            except (EngineError, CheckpointError, DeviceError, OSError) as error:
                self._failed_starts += 1
                delay = min(delay * 2, self.options.backoff_last)
                if self._failed_starts >= STARTS:
                    self._fail_all(EngineError(f"the engine does not start again: {error}"))
        self._failed_starts = 0
        self._restarts += 1
        self._worker = worker
        self._learnt.clear()
        for stream in self._streams.values():
            self._start(stream)
        for job in self._embeds.values():
            worker.send(job.message)
        return worker

    def _fail_all(self, error: EngineError) -> None:
        for request_id in list(self._streams):
            self._put(request_id, error)
        for job in self._embeds.values():
            job.fail(error)
