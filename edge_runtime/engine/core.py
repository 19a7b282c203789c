"""The engine core: one asynchronous loop that schedules, runs steps, samples and emits tokens."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.engine.device_thread import DeviceThread, InFlight, NoRoom
from nearfar.edge_runtime.engine.generation import Generation, event_of
from nearfar.edge_runtime.engine.kernel_wait import KernelWait
from nearfar.edge_runtime.engine.reading import PromptProgress
from nearfar.edge_runtime.engine.requests import Constraint, FinishReason, Request, TokenEvent, outside
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scheduler import Scheduler, StepLimits
from nearfar.edge_runtime.engine.steps import Done, Run, StepWriter
from nearfar.edge_runtime.engine.warming import of_decode, run_each
from nearfar.edge_runtime.progress import Ready, Teller
from nearfar.errors import DeviceError, DeviceLost, NearfarError, OutOfMemory, RequestError
from nearfar.format.manifest import Manifest, Program
from nearfar.format.sizes import MAX_STEP

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from nearfar.edge_runtime.artifact.variants import ProgramChoice
    from nearfar.edge_runtime.executors.base import Executor

MOST_LOSSES = 3
"""How often a lost device is reopened in a row without a token in between."""

EMBEDDED = SamplingParams(max_tokens=1, ignore_eos=True)
EMBEDDINGS = "ask for them (engine.embeddings.create, POST /v1/embeddings), or load a model that writes"

CLOSED = "the engine is closed; load the artifact again"
FORKED = (
    "the engine was loaded before this process was forked, and its threads stayed with the parent: load the "
    "artifact here, or start processes another way (multiprocessing's spawn)"
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class EngineCore:
    """Runs token ids through one executor. Text, templates and OpenAI's records are layers above it.

    All work happens on the event loop, except the calls of the executor and of constraints: they run in one
    thread, in order (DeviceThread). So a slow mask delays steps, but no other work on the event loop. A step
    that fails ends an *epoch*: results of it and of its predecessors are no longer found, the device is
    reopened before the next step (or, if it cannot be, every call is refused), and the recorded state of its
    buffers starts afresh.
    """

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        program: Program,
        pages: Seq[int],
        *,
        context: int | None = None,
        pipelined: bool = True,
        reopen: Callable[[], Executor] | None = None,
    ) -> None:
        """Take over an executor with `pages` pages by group, and room for `context` positions a sequence.

        `pipelined`: queue a step before the tokens of the last one are read; an executor that computes inside
        `run` gains nothing from that. `reopen`: makes a new executor after a failure; if the device was lost
        (DeviceLost), requests continue where they were. Without `reopen` the engine ends at the first
        failure.
        """
        self.choice: ProgramChoice | None = None
        """The reason for the executor's program, if there was a choice."""
        self.manifest = manifest
        cache, model = manifest.cache, manifest.model
        buckets = sorted(function.size for function in program.functions["step"])
        self.largest_bucket = buckets[-1]
        """Rows of the largest step of the program."""
        rows = min(max(each.rows for each in function) for function in program.functions.values())
        windows, strides = zip(*((group.window, group.stride) for group in manifest.groups), strict=True)
        table = SequenceTable(pages, cache.page_size, cache.slots, windows, strides)
        self.context = table.longest(MAX_STEP, min(context or model.context_length, model.context_length))
        self.scheduler = Scheduler(table, StepLimits(tuple(buckets), min(rows, cache.slots), self.context))
        self._new_builder = partial(StepWriter, manifest, program, feed=pipelined)
        self._builder = self._new_builder()
        self._compiled: set[Run] = set()  # runs whose kernels are known to be compiled
        self.compiling = KernelWait()
        self.reading = PromptProgress()
        self.warming: Callable[[int, int], None] = lambda done, total: None
        """Called with the number of plans that have run once, and the total."""
        self._lost_in_a_row = 0
        self.epoch = 0
        """The number of failed steps: each voids the earlier contents of the cache."""
        self._generations: WeakValueDictionary[int, Generation] = WeakValueDictionary()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._process = os.getpid()
        self.steps = 0
        self.last_read = -math.inf
        """The time at which a step was last read, on the monotonic clock."""
        self.step_seconds = 0.0
        """Seconds spent waiting for that step."""
        self._device = DeviceThread(executor, self._begin, reopen, pipelined)

    def tell(self, teller: Teller) -> None:
        """Report from now on what answers wait for: kernels, plans that run for the first time,
        and prompts.
        """
        self.compiling.tell = partial(teller, "kernels")
        self.reading.tell = partial(teller, "prompt")
        self.warming = partial(teller, "warming")

    async def make_ready(self, wanted: Ready) -> None:
        """Compile kernels and run them once, so that no answer waits for a compiler (some drivers compile at
        first use).

        `wanted`: "all" kernels, those of "decode" (after the first token), or "no" kernels. Raises compilers'
        and devices' errors. Large steps for which there is no memory are given up, as they would be later.
        """
        while wanted != "no" and self._device.pipelined:  # other devices compile their kernels at build time
            try:
                await self._warm_up(wanted == "all")
                return
            except NoRoom as error:
                self._end_epoch()
                if not self._device.reopens or not self._shrinks(error.size, error.reason):
                    raise error.reason from error

    async def _warm_up(self, everything: bool) -> None:
        every = self._wanted_runs()
        runs = every if everything else of_decode(every)
        # begins to compile all, so that no compile thread is idle
        self.compiling.expect(await self._device.missing(runs))
        for name, size in runs:
            while (name, size) not in self._compiled and (name != "step" or size <= self.largest_step):
                await self._prepare(size if name == "step" else self.largest_step, [(name, size)])
        self.compiling.end()
        fit = [(name, size) for name, size in runs if name != "step" or size <= self.largest_step]
        await run_each(fit, self._builder, self._device, self.warming)

    @property
    def executor(self) -> Executor:
        """The executor that computes now; reopening the device replaces it."""
        return self._device.executor

    def generate(
        self,
        tokens: Seq[int],
        params: SamplingParams | None = None,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> Generation:
        """Start a request; call this on the event loop that will iterate the result.

        The request shares prefixes only with requests of the same `salt`: tenants of one engine must not
        learn of each other's prompts.
        """
        self.check_open()
        if self.manifest.model.task == "embed":
            raise RequestError(f"this model gives embeddings and no text: {EMBEDDINGS}", "model")
        params = params or SamplingParams()
        self._check_tokens(tokens)
        params.check_vocabulary(self.manifest.model.vocab_size)
        limit = self.scheduler.limit_tokens(tokens, params.max_tokens)
        seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
        return self.start(Request(tuple(tokens), params, limit, seed, constraint=constraint, salt=salt))

    async def embed_all(self, texts: Seq[Seq[int]], salt: str = "") -> list[npt.NDArray[np.float32]]:
        """Compute the embeddings of texts, float32 [width] each: the last token's state as the model computes
        it.

        If one of them is refused, none is begun.
        """
        self.check_embeds(texts)
        return await self.embed_checked(texts, salt)

    async def embed_checked(self, texts: Seq[Seq[int]], salt: str = "") -> list[npt.NDArray[np.float32]]:
        """Return the embeddings of texts that `check_embeds` has accepted, as `embed_all` does."""
        self.check_open()
        # The request has one token that is never sampled: the row that would give the token gives the
        # embedding.
        begun = [self.start(Request(tuple(tokens), EMBEDDED, 1, 0, salt=salt)) for tokens in texts]
        try:
            events = [await anext(generation) for generation in begun]
        finally:
            for generation in begun:
                await generation.aclose()
        return [np.asarray(event.embedding, np.float32) for event in events]

    def check_scores(self, prompt: Seq[int], labels: Seq[Seq[int]]) -> None:
        """Raise RequestError if labels after a prompt cannot be scored by this model or in this context."""
        self.check_open()
        if self.manifest.model.task == "embed":
            raise RequestError(f"this model gives embeddings and no text: {EMBEDDINGS}", "model")
        if not labels or not all(len(label) for label in labels):
            raise RequestError("labels: give at least one, and no empty one", "labels")
        self._check_tokens(prompt)
        for label in labels:
            self._check_tokens(label)
        self.scheduler.check_length([*prompt, *max(labels, key=len)])

    def check_embeds(self, texts: Seq[Seq[int]]) -> None:
        """Raise RequestError if texts cannot be embedded by this model or in this context."""
        self.check_open()
        if self.manifest.model.task != "embed":
            raise RequestError(
                "this model gives text and no embeddings: build a checkpoint of an embedding model, or this "
                "one with nearfar build --embeddings",
                "model",
            )
        for tokens in texts:
            self._check_tokens(tokens)
            self.scheduler.check_length(tokens)

    def start(self, request: Request) -> Generation:
        """Queue a checked request."""
        generation = self._generations[request.number] = Generation(request, self.cancel)
        self.scheduler.add(request)
        self.wake()
        return generation

    def cancel(self, request: Request) -> None:
        """End a request; results that the device still computes for it are dropped."""
        if not request.done:
            self.scheduler.remove(request)
        self._generations.pop(request.number, None)

    async def on_device(self, call: Callable[[], T]) -> T:
        """Run `call` in the executor's thread: after all queued steps, before any later step.

        Page copies that a later step would begin with are made before, since the call may write to their
        pages.
        """
        self.check_open()
        return await self._device.call(call, self.scheduler.take_copies())

    def wake(self) -> None:
        """Start the loop if it stands still, after a request has arrived or held pages were released."""
        if self.scheduler.waiting and not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._loop())

    async def close(self) -> None:
        """Stop all requests and free the device. In a forked process, do nothing: all of that belongs to the
        parent.
        """
        if self._closed:
            return
        self._closed = True
        if self.forked:
            return
        self._fail(DeviceError("the engine was closed while the request was running"))
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        await self._device.close()

    @property
    def largest_step(self) -> int:
        """Rows of the largest step that the engine takes: below the largest bucket if there was no memory for
        that.
        """
        return self.scheduler.limits.max_rows

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that loaded the engine: the compute threads
        are not here.
        """
        return os.getpid() != self._process

    async def _loop(self) -> None:
        """Run steps until there is nothing to do; if the device is lost, reopen it and continue."""
        while True:
            try:
                await self._steps()
                return
            except asyncio.CancelledError:
                self._end_epoch()
                self._fail(
                    DeviceError("the event loop of the engine was stopped while the request was running")
                )
                raise
            except NoRoom as error:
                self._end_epoch()
                if not self._device.reopens or not self._shrinks(error.size, error.reason):
                    self._fail(error.reason)
                    return
            except Exception as error:
                self._end_epoch()
                if not self._goes_on(error):
                    self._fail(error)
                    return

    async def _steps(self) -> None:
        """Schedule, step, sample and emit until there is nothing to do."""
        before: InFlight | None = None
        while True:
            step = self.scheduler.schedule(before[0] if before else None)
            runs = self._builder.runs(step) if step else ()
            if step and not self._compiled.issuperset(runs):
                self.scheduler.put_back(step)
                if before is None:
                    await self._prepare(step.size, runs)
                    continue  # the step is planned again, because requests may have come and gone meanwhile
                step = None
            self.compiling.end()
            work = self._builder.build(step) if step else None
            if step:
                self.steps += 1
                self.scheduler.queue(step)
                self._tell_reading()
            elif before is None:
                self._tell_reading()
                return
            began = time.monotonic()
            before, read = await self._device.turn(step, work, before)
            if read:
                self.last_read = time.monotonic()
                self.step_seconds = self.last_read - began
            for done in read:
                self._lost_in_a_row = 0
                self._emit(done)

    async def _prepare(self, size: int, runs: Seq[Run]) -> None:
        """Request the kernels of a step of `size` rows and wait until one of them is compiled.

        It waits for no more than one, since the next plan may be another.
        """
        missing = await self._device.missing(runs)
        if not missing:
            self._compiled.update(runs)
            return
        try:
            await self.compiling.wait(missing)
        except (OutOfMemory, MemoryError) as error:
            if not self._shrinks(size, error):
                raise

    def _end_epoch(self) -> None:
        """Forget the state of the device after a failed step: requests are computed again from their tokens,
        or fail.
        """
        self.epoch += 1
        self.scheduler.restart()
        self._builder = self._new_builder()
        self._device.end_epoch()
        self._compiled.clear()
        self.compiling.end()

    def _goes_on(self, error: Exception) -> bool:
        """Whether requests continue after an error: the device was lost and can be reopened, but not too
        often in a row.
        """
        if not isinstance(error, DeviceLost):
            return False
        self._lost_in_a_row += 1
        if not self._device.reopens or self._lost_in_a_row > MOST_LOSSES:
            self._lost_in_a_row = 0
            return False
        return not self._closed

    def _shrinks(self, size: int, reason: Exception) -> bool:
        """Whether the engine has buckets smaller than `size`; if it has, only those are used from now on."""
        smaller = self.scheduler.limits.below(size)
        if smaller is None or self._closed:
            return False
        self.scheduler.shrink(smaller)
        log.warning(
            "there was no memory for steps of %d rows; from now on this engine takes steps of at most %d "
            "rows, so that prompts take longer (%s). Give the cache less (--kv-memory), or close other "
            "programs that use the device, and load the artifact again",
            size, smaller.max_rows, reason,
        )  # fmt: skip
        return True

    def _begin(self, executor: Executor) -> None:
        """Runs in the device thread: make the initial writes, and prepare kernels that steps will need."""
        for write in self._builder.initial():
            executor.write(write.buffer, write.data, write.row)
        for name, size in self._wanted_runs():
            executor.prepare(name, size, later=True)

    def _wanted_runs(self) -> list[Run]:
        """All runs, except steps for which there was no memory."""
        return [
            (name, size)
            for name, size in self._builder.every_run()
            if name != "step" or size <= self.largest_step
        ]

    def _tell_reading(self, sampled: Seq[Request] = ()) -> None:
        """Report how much of the prompts has been read; requests in `sampled` get their token now."""
        running = self.scheduler.running
        self.reading.update(r for r in running if not r.first and r not in sampled)

    def _emit(self, done: Done) -> None:
        """Publish the results of a step and give each of its requests its token."""
        sampled = done.step.sampled
        scored = [request for request, _ in done.step.scored]
        for request in (*sampled, *scored):
            if request.number in done.refused and not request.done:
                self._refuse(request, done.refused[request.number])
        self.scheduler.publish(done.step)
        self._tell_reading(sampled)  # progress is told before the token is emitted
        for row, request in enumerate(sampled):
            if request.done:
                continue
            token = int(done.sampled.tokens[row])
            request.accept(token)
            self.scheduler.record(request)
            reason = self._finish_reason(request, token)
            generation = self._generations.get(request.number)
            if generation is not None:
                generation.put(event_of(request, token, reason, done.sampled, row))
            if reason or generation is None:
                self.cancel(request)
        for (request, place), scores in zip(done.step.scored, done.sampled.scores, strict=True):
            request.scores[place.position] = scores
        for request in dict.fromkeys(scored):
            if not request.done and request.read >= len(request.tokens):
                self._scored(request)

    def _scored(self, request: Request) -> None:
        """Give a request its scores. A held one keeps its pages until its caller cancels it."""
        request.first = request.last = time.monotonic()
        generation = self._generations.get(request.number)
        if generation is not None:
            generation.put(TokenEvent(0, None if request.held else "stop", scores=request.scores))
        if generation is None or not request.held:
            self.cancel(request)

    def _refuse(self, request: Request, error: Exception) -> None:
        """End one request with an error."""
        generation = self._generations.get(request.number)
        if generation is not None:
            generation.put(error)
        self.cancel(request)

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in self.manifest.model.eos_token_ids and not request.params.ignore_eos:
            return "stop"
        return "length" if len(request.tokens) - len(request.prompt) >= request.limit else None

    def _fail(self, error: Exception) -> None:
        """End every request with an error."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.remove(request)
        self._tell_reading()
        for generation in list(self._generations.values()):
            known = isinstance(error, NearfarError)
            generation.put(
                error if known else DeviceError(f"the device failed: {type(error).__name__}: {error}")
            )
        self._generations.clear()

    def _check_tokens(self, tokens: Seq[int]) -> None:
        if not len(tokens):
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        vocab = self.manifest.model.vocab_size
        position = outside(tokens, vocab)
        if position is not None:
            raise RequestError(
                f"token id {tokens[position]} at position {position} is outside the vocabulary of {vocab} "
                "tokens",
                "prompt",
            )

    def check_open(self) -> None:
        """Raise DeviceError if the engine is closed, forked, or has failed for good."""
        if self._closed:
            raise DeviceError(CLOSED)
        if self.forked:
            raise DeviceError(FORKED)
        if self._device.failed is not None and not self._device.reopens:
            raise DeviceError(
                f"the device has failed ({self._device.failed}), and the engine ended there; load the "
                "artifact again"
            )
