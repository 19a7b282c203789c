"""Turns a scheduled step into the device's inputs: the small buffers of docs/artifact.md, and the sampler's
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from nearfar.edge_runtime.cache import Copy, HeldPages, Sequence, common_length
from nearfar.edge_runtime.engine.requests import Constraint, Request, RowScores, ScoredRow
from nearfar.edge_runtime.engine.row_scores import row_scores
from nearfar.edge_runtime.engine.scheduler import ScheduledStep
from nearfar.errors import DeviceError, NearfarError, RequestError
from nearfar.format.buffers import page_table
from nearfar.format.manifest import Manifest, Program
from nearfar.format.sampler import COLDEST, COLUMNS, PROMPT_FLAG, SampleF32, SampleI32
from nearfar.format.sizes import MAX_ROWS

if TYPE_CHECKING:
    from nearfar.edge_runtime.executors.base import Executor

Array = npt.NDArray[Any]

EVERY = 0xFFFFFFFF
"""A word of `allowed` that allows all of its 32 tokens."""


NO_TOKEN = "the grammar allows no token here, or takes too long to follow; make it simpler"

NOT_FINITE = (
    "the logits (or the embedding) of this request are not finite numbers: the model overflows in the "
    "precision that it runs in. Load it with precision f32 (--precision f32); if it runs in f32 already, "
    "report the model and the prompt"
)


Run = tuple[str, int]
"""The name of a function and its bucket."""


@dataclass(frozen=True)
class Write:
    """Data for a buffer from row `row` on, or for a part of one row from column `column` on."""

    buffer: str
    data: Array
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Mask:
    """A constrained request and its slot; the constraint gives the mask when the step is launched."""

    request: Request
    slot: int


@dataclass
class StepWork:
    """The work of the device for one step, in order: page copies, writes and masks, runs."""

    size: int
    copies: tuple[Copy, ...]
    writes: list[Write]
    masks: list[Mask] = field(default_factory=list)
    embeds: bool = False
    """Whether the model gives embeddings: nothing is sampled, the rows are read."""
    sampler: Literal["greedy", "sample"] | None = None
    sampler_size: int = 0
    sampled: int = 0
    logprobs_size: int = 0
    scored: tuple[ScoredRow, ...] = ()
    """Rows whose logits are read, after those of sampled requests."""


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of a step, a row a request. Token -1: no logit of the row was finite."""

    tokens: Array
    logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    scores: tuple[RowScores, ...] = ()
    """The scores of the rows that the step scores."""
    embeddings: Array | None = None
    """float32 [R, width], from a model that gives embeddings; tokens are then 0, or −1 if a value is not
    finite.
    """


Refused = dict[int, NearfarError]
"""The errors that end requests at a step, by request number; the other requests of the step continue."""


@dataclass(frozen=True)
class Launched:
    """A step that the device is computing. `read` waits for its tokens."""

    read: Callable[[], Sampled]
    refused: Refused


@dataclass(frozen=True)
class Done:
    """A step that has been read. The tokens of `refused` requests have no meaning."""

    step: ScheduledStep
    sampled: Sampled
    refused: Refused


@dataclass
class _SlotState:
    """The contents of a slot's rows on the device, so that only changes are written."""

    held: list[HeldPages]
    owner: Sequence | None = None
    biased: bool = False
    constrained: bool = False


class StepWriter:
    """Builds the device's work for steps, and remembers the device's state of each slot."""

    def __init__(self, manifest: Manifest, program: Program, feed: bool) -> None:
        self._model = manifest.model
        groups = len(manifest.groups)
        self._slots = [_SlotState([HeldPages() for _ in range(groups)]) for _ in range(manifest.cache.slots)]
        self._sizes = {name: sorted(f.size for f in buckets) for name, buckets in program.functions.items()}
        self._feed = feed
        self._words = (manifest.model.vocab_size + 31) // 32
        rows = max(self._sizes["step"])
        self._written = {"slots": np.full(rows, -2, np.int32), "logit_rows": np.full(MAX_ROWS, -2, np.int32)}

    def initial(self) -> list[Write]:
        """The writes of a new device: no bias, every token allowed."""
        slots, vocab = len(self._slots), self._model.vocab_size
        if self._model.task == "embed":
            return []
        return [
            Write("logit_bias", np.zeros((slots, vocab), np.float32)),
            Write("counts", np.zeros((slots, vocab), np.int32)),
            Write("allowed", np.full((slots, self._words), EVERY, np.uint32)),
        ]

    def build(self, step: ScheduledStep) -> StepWork:
        """Build the work of a step. Call this in the order in which steps run, before their rows count as
        queued.
        """
        work = StepWork(step.size, step.copies, self._rows(step))
        work.scored = tuple(row for _, row in step.scored)
        requests = step.sampled
        for chunk in step.chunks:
            if chunk is not None:
                work.writes += self._page_table(chunk.request)
        if self._model.task == "embed":
            work.embeds, work.sampled = True, len(requests)
        elif requests:
            self._sampler(work, step)
        return work

    def runs(self, step: ScheduledStep) -> tuple[Run, ...]:
        """The functions of a step with their buckets, in order: `step`, `greedy` or `sample`,
        and `logprobs`.
        """
        requests = step.sampled
        if not requests or self._model.task == "embed":
            return (("step", step.size),)
        plain = all(r.params.plain_greedy and r.constraint is None for r in requests)
        wanted = ["greedy" if plain else "sample"]
        if any(r.params.logprobs is not None for r in requests):
            wanted.append("logprobs")
        return ("step", step.size), *((name, self._size(name, len(requests))) for name in wanted)

    def every_run(self) -> list[Run]:
        """All functions in all their buckets; those that a first answer needs come first."""
        names = list(self._sizes)
        longest = max(map(len, self._sizes.values()))
        return [(n, self._sizes[n][i]) for i in range(longest) for n in names if i < len(self._sizes[n])]

    def idle(self, run: Run) -> tuple[ScheduledStep, StepWork]:
        """A step of padding rows that runs a function in one bucket; no request reads its results."""
        name, size = run
        step = ScheduledStep(size if name == "step" else self._sizes["step"][0], (), 0, ())
        work = self.build(step)
        if name != "step":
            ints, floats = _no_sampling()
            work.writes += [Write("sample_i32", ints), Write("sample_f32", floats)]
            work.sampled = 1
            work.sampler = "sample" if name == "sample" else "greedy"
            work.sampler_size = self._size(work.sampler, 1) if name == "logprobs" else size
            work.logprobs_size = size if name == "logprobs" else 0
        return step, work

    def _rows(self, step: ScheduledStep) -> list[Write]:
        tokens = np.zeros(step.size, np.int32)
        positions = np.full(step.size, -1, np.int32)
        slots = np.zeros(step.size, np.int32)
        logit_rows = np.zeros(MAX_ROWS, np.int32)
        row = sampled = 0
        scored: list[int] = []
        for chunk in step.chunks:
            if chunk is None:
                row += 1
                continue
            scored += [row + each.position - chunk.start for each in chunk.scored]
            assert chunk.request.sequence is not None
            end = row + chunk.count
            known = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
            tokens[row : row + len(known)] = known
            positions[row:end] = np.arange(chunk.start, chunk.start + chunk.count)
            slots[row:end] = chunk.request.sequence.slot
            if chunk.samples:
                logit_rows[sampled] = end - 1
                sampled += 1
            row = end
        used = sampled + len(scored)
        logit_rows[sampled:used] = scored
        logit_rows[used:] = logit_rows[max(0, used - 1)]
        writes = [
            Write("positions", positions),
            *self._changed("slots", slots),
            *self._changed("logit_rows", logit_rows),
        ]
        if step.fed < step.size:
            writes.append(Write("tokens", tokens[step.fed :], step.fed))
        return writes

    def _changed(self, buffer: str, data: npt.NDArray[np.int32]) -> list[Write]:
        """The write of `data`, or nothing if the buffer already has it, as while the same requests decode."""
        known = self._written[buffer][: len(data)]
        if np.array_equal(known, data):
            return []
        known[:] = data
        return [Write(buffer, data)]

    def _page_table(self, request: Request) -> list[Write]:
        """The writes that bring the slot's rows of the page tables up to date.

        Entries of released pages go stale: no kernel reads them.
        """
        sequence = request.sequence
        assert sequence is not None
        state = self._slots[sequence.slot]
        writes = []
        for group, (known, held) in enumerate(zip(state.held, sequence.held, strict=True)):
            if known == held:
                continue
            there = known.pages[held.first - known.first :] if known.first <= held.first else []
            same = common_length(held.pages, there)
            if same < len(held.pages):
                changed = np.array([held.pages[same:]], np.int32)
                writes.append(Write(page_table(group), changed, sequence.slot, held.first + same))
            known.first, known.pages = held.first, list(held.pages)
        return writes

    def _sampler(self, work: StepWork, step: ScheduledStep) -> None:
        requests = step.sampled
        work.sampled = len(requests)
        sizes = dict(self.runs(step))
        work.sampler = "greedy" if "greedy" in sizes else "sample"
        work.sampler_size = sizes[work.sampler]
        work.logprobs_size = sizes.get("logprobs", 0)
        ints, floats = _no_sampling()
        for index, chunk in enumerate(c for c in step.chunks if c is not None and c.samples):
            request, params = chunk.request, chunk.request.params
            assert request.sequence is not None
            low, high = np.array([request.seed & 0xFFFFFFFF, request.seed >> 32], np.uint32).view(np.int32)
            feed = index if self._feed else -1
            drawn_at = chunk.start + chunk.count
            ints[index, : len(SampleI32)] = request.sequence.slot, params.top_k, low, high, drawn_at, feed
            penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            # Kernels clamp in the same way. Without this, a number too small for float32 would become 0.
            temperature = max(params.temperature, COLDEST) if params.temperature else 0.0
            floats[index, : len(SampleF32)] = temperature, params.top_p, params.min_p, *penalties
            if work.sampler == "sample":
                work.writes += self._slot_rows(request)
                self._allowed(work, request)
        work.writes.append(Write("sample_i32", ints))
        if work.sampler == "sample":
            work.writes.append(Write("sample_f32", floats))

    def _slot_rows(self, request: Request) -> list[Write]:
        """Write the bias and the counts of a slot that a request has just taken."""
        sequence, params, vocab = request.sequence, request.params, self._model.vocab_size
        assert sequence is not None
        state = self._slots[sequence.slot]
        if state.owner is sequence:
            return []
        state.owner = sequence
        writes: list[Write] = []
        if params.logit_bias or state.biased:
            bias = np.zeros((1, vocab), np.float32)
            bias[0, list(params.logit_bias)] = list(params.logit_bias.values())
            state.biased = bool(params.logit_bias)
            writes.append(Write("logit_bias", bias, sequence.slot))
        if params.penalized:
            answer = np.array(request.tokens[len(request.prompt) :], np.int64)
            counts = np.bincount(answer, minlength=vocab).astype(np.int32)
            counts[list(request.prompt)] |= PROMPT_FLAG
            writes.append(Write("counts", counts[None], sequence.slot))
        return writes

    def _allowed(self, work: StepWork, request: Request) -> None:
        """Add the mask of the allowed tokens: at each step for a constrained request, once for the next one
        in its slot.
        """
        assert request.sequence is not None
        slot = request.sequence.slot
        state = self._slots[slot]
        if request.constraint is not None:
            work.masks.append(Mask(request, slot))
        elif state.constrained:
            work.writes.append(Write("allowed", np.full((1, self._words), EVERY, np.uint32), slot))
        state.constrained = request.constraint is not None

    def _size(self, function: str, rows: int) -> int:
        return next(size for size in self._sizes[function] if size >= rows)


def launch(executor: Executor, work: StepWork) -> Launched:
    """Enqueue a step. A failing constraint ends its own request; an error of the executor ends the epoch."""
    for group, source, target in work.copies:
        executor.copy_page(group, source, target)
    for write in work.writes:
        executor.write(write.buffer, write.data, write.row, write.column)
    executor.run("step", work.size)
    if work.embeds:
        rows = executor.fetch("embedding", max(work.sampled, 1))
        return Launched(lambda: _embedded(rows()), {})
    logits = executor.fetch("logits", work.sampled + len(work.scored)) if work.scored else None

    def scores() -> tuple[RowScores, ...]:
        return row_scores(logits()[work.sampled :], work.scored) if logits else ()

    # Only the sampler reads masks: a device that runs asynchronously computes the logits meanwhile.
    refused: Refused = {}
    for mask in work.masks:
        row = _allowed(mask.request, refused)
        if row is not None:
            executor.write("allowed", row[None], mask.slot)
    if work.sampler is not None:
        executor.run(work.sampler, work.sampler_size)
    # Results are read even if nothing was sampled, so that at most two steps are in flight.
    tokens = executor.fetch("sampled", max(work.sampled, 1))
    if not work.logprobs_size:
        return Launched(lambda: Sampled(tokens(), scores=scores()), refused)
    executor.run("logprobs", work.logprobs_size)
    chosen = executor.fetch("logprob", work.sampled)
    ids, values = executor.fetch("top_ids", work.sampled), executor.fetch("top_logprobs", work.sampled)
    return Launched(lambda: Sampled(tokens(), chosen(), ids(), values(), scores()), refused)


def _no_sampling() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Sampler parameter rows without a request: slot and feed are -1."""
    ints, floats = np.zeros((MAX_ROWS, COLUMNS), np.int32), np.zeros((MAX_ROWS, COLUMNS), np.float32)
    ints[:, SampleI32.SLOT] = ints[:, SampleI32.FEED] = -1
    return ints, floats


def _embedded(rows: Array) -> Sampled:
    """Results of an embedding step: float32 rows, with token 0, or -1 where a value is not finite."""
    finite = np.isfinite(rows).all(axis=1)
    return Sampled(np.where(finite, 0, -1).astype(np.int32), embeddings=rows)


def finish(step: ScheduledStep, launched: Launched, sampled: Sampled) -> Done:
    """The results of a step: constraints accept their tokens, and requests without a token are refused."""
    refused = dict(launched.refused)
    for (request, _), scores in zip(step.scored, sampled.scores, strict=True):
        if not math.isfinite(scores.top[0]):
            refused[request.number] = DeviceError(NOT_FINITE)
    for row, request in enumerate(step.sampled):
        if request.done or request.number in refused:
            continue
        token = int(sampled.tokens[row])
        if token < 0:
            refused[request.number] = DeviceError(NOT_FINITE)
        elif request.constraint is not None:
            _accept(request, request.constraint, token, refused)
    return Done(step, sampled, refused)


def _allowed(request: Request, refused: Refused) -> Array | None:
    """The mask of a request's constraint, uint32 [(vocab_size+31)//32].

    None if the constraint fails or allows no token; `refused` then has the error.
    """
    assert request.constraint is not None
    try:
        row = request.constraint.allowed()
    except Exception as error:
        refused[request.number] = _grammar_failed(error)
        return None
    if not row.any():
        refused[request.number] = RequestError(NO_TOKEN, "response_format")
        return None
    return row


def _accept(request: Request, constraint: Constraint, token: int, refused: Refused) -> None:
    try:
        if not constraint.accept(token):
            refused[request.number] = RequestError(NO_TOKEN, "response_format")
    except Exception as error:
        refused[request.number] = _grammar_failed(error)


def _grammar_failed(error: Exception) -> NearfarError:
    if isinstance(error, NearfarError):
        return error
    return RequestError(
        f"the grammar failed ({type(error).__name__}: {error}); make it simpler", "response_format"
    )
