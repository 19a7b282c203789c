"""Decides what the next step computes: which rows of which requests, in which bucket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

from nearfar.edge_runtime.cache import Copy, SequenceTable, common_length
from nearfar.edge_runtime.engine.prefill import LOOKED_AT, OVERTAKEN, is_short, kept_rows, share_rows
from nearfar.edge_runtime.engine.requests import Request, ScoredRow
from nearfar.edge_runtime.engine.row_scores import scored_rows
from nearfar.errors import ContextError

MORE_ROOM = ", or give the cache more memory if the model allows it"


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step and of a sequence. `buckets` are the sizes of `step`, smallest first."""

    buckets: tuple[int, ...]
    max_logits: int
    context: int

    @property
    def max_rows(self) -> int:
        """Token rows of the largest bucket."""
        return self.buckets[-1]

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds these rows."""
        return next(size for size in self.buckets if size >= rows)

    def below(self, size: int) -> StepLimits | None:
        """The limits of steps smaller than a bucket; None if it is the smallest."""
        smaller = tuple(bucket for bucket in self.buckets if bucket < size)
        if not smaller:
            return None
        return replace(self, buckets=smaller, max_logits=min(self.max_logits, smaller[-1]))

    def prefill_rows(self, decode: int, wanted: int) -> int:
        """The number of prefill rows, of `wanted` rows, to compute together with `decode` decode rows.

        Padding costs as much as work: rather than run a bucket more than half empty, fill the next smaller
        one and leave the other rows to the next step. Up to 16 rows a step costs about one pass over the
        weights, full or not.
        """
        total = min(decode + wanted, self.max_rows)
        size = self.bucket(total)
        below = max((smaller for smaller in self.buckets if smaller < size), default=0)
        if below >= 16 and total * 2 <= size and below > decode:
            total = below
        return total - decode


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one request: `count` positions from `start`.

    If `samples`, the last row's logits give its next token. The logits of `scored` rows are read.
    """

    request: Request
    start: int
    count: int
    samples: bool
    scored: tuple[ScoredRow, ...] = ()


@dataclass(frozen=True)
class ScheduledStep:
    """One step: chunks in row order (None is one padding row), and the page copies to make before it.

    The first `fed` rows take their tokens from the sampler of the previous step.
    """

    size: int
    chunks: tuple[Chunk | None, ...]
    fed: int
    copies: tuple[Copy, ...]

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of their logits rows."""
        return [chunk.request for chunk in self.chunks if chunk is not None and chunk.samples]

    @property
    def scored(self) -> list[tuple[Request, ScoredRow]]:
        """The rows whose logits are read; their rows of logits come after those of sampled requests."""
        return [(chunk.request, row) for chunk in self.chunks if chunk is not None for row in chunk.scored]


class Scheduler:
    """Schedules waiting requests in order of arrival, and running requests in order of admission.

    Running requests decode first; prompts share the remaining rows of a step (prefill.py). When pages run
    out, the request admitted last releases its pages and is computed again later.
    """

    def __init__(self, table: SequenceTable, limits: StepLimits) -> None:
        self.table = table
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._copies: list[Copy] = []  # page copies that the next step must make first

    @property
    def free_tokens(self) -> int:
        """Tokens that new requests could put into the cache now, as one request or as a full context in each
        slot. Requests that only hold their pages make room for others.
        """
        everything = self.limits.context * self.limits.max_logits
        idle = [request.sequence for request in self.running if request.idle and request.sequence]
        return self.table.longest_now(self.limits.max_rows, everything, idle)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def limit_tokens(self, prompt: Seq[int], max_tokens: int | None) -> int:
        """The number of tokens that an answer to the prompt may have; ContextError if the prompt leaves room
        for none.
        """
        context = self.limits.context
        if len(prompt) >= context:
            raise ContextError(len(prompt), context, "prompt", advice=MORE_ROOM)
        room = context - len(prompt)
        return room if max_tokens is None else min(max_tokens, room)

    def check_length(self, text: Seq[int]) -> None:
        """Raise ContextError for a text that does not fit the context, although nothing is to be generated
        after it.
        """
        if len(text) > self.limits.context:
            raise ContextError(len(text), self.limits.context, "input", what="input", advice=MORE_ROOM)

    def remove(self, request: Request) -> None:
        """Forget a finished or cancelled request; its pages stay in the prefix index while there is room."""
        request.done = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def restart(self) -> None:
        """Void the cache's contents: running requests wait again, in their order, and are computed from their
        tokens.
        """
        for request in reversed(self.running):
            self._release(request)
            if request.idle:
                continue
            request.queued = request.pending = 0
            self.waiting.appendleft(request)
        self.running.clear()
        self._copies.clear()
        self.table.forget()

    def shrink(self, limits: StepLimits) -> None:
        """Take smaller steps from now on; no step may be in flight. Requests that no longer fit in a step
        wait.
        """
        self.limits = limits
        while len(self.running) > limits.max_logits:
            self._preempt(self.running[-1])

    def put_back(self, step: ScheduledStep) -> None:
        """Put back a planned step that does not run now; the next step makes its page copies."""
        self._copies[:0] = step.copies

    def schedule(self, before: ScheduledStep | None) -> ScheduledStep | None:
        """Plan the next step. `before` is the step in flight whose tokens have not been read, if any.

        None: there is nothing to do, or nothing can be done before `before` has been read.
        """
        chunks = self._decode_rows(before)
        if chunks is None:
            return None
        decoding = len(chunks)
        wanted = self._prefill_wanted(before, decoding)
        budget = self.limits.prefill_rows(decoding, sum(r.remaining for r in wanted)) if wanted else 0
        # Each other request may need a row of logits in this step.
        room = self.limits.max_logits - sum(not request.scored for request in self.running)
        for request, take in zip(wanted, share_rows([*map(self._computable, wanted)], budget), strict=True):
            fits, scored = scored_rows(request.scored, request.queued, take, room)
            room -= len(scored)
            if fits > 0:
                samples = fits == request.remaining and not request.scored
                chunks.append(Chunk(request, request.queued, fits, samples, scored))
        if not any(chunks):
            if wanted and before is None:
                # prompts that wait for each other's pages would wait for ever, so the last request gives its
                # pages up
                self._preempt(self.running[-1])
                return self.schedule(None)
            return None
        if before and len(chunks) == decoding and _better_together(before, chunks):
            return None
        rows = sum(chunk.count if chunk else 1 for chunk in chunks)
        fed = len(before.sampled) if before else 0
        return ScheduledStep(self.limits.bucket(rows), tuple(chunks), fed, self.take_copies())

    def take_copies(self) -> tuple[Copy, ...]:
        """Take the pending page copies; the caller must make them before anything else."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def queue(self, step: ScheduledStep) -> None:
        """Record that a step was given to the device: the next step is planned as if its rows
        were computed.
        """
        for chunk in step.chunks:
            if chunk is not None:
                chunk.request.queued += chunk.count
                chunk.request.pending += chunk.samples
                self.record(chunk.request)
                self._keep_border(chunk.request)

    def publish(self, step: ScheduledStep) -> None:
        """Record that a step has been read: other requests may start from the pages that it filled."""
        for chunk in step.chunks:
            if chunk is not None and chunk.request.sequence is not None:
                self.table.publish(chunk.request.sequence, chunk.start + chunk.count)
                chunk.request.read = chunk.start + chunk.count
                self.table.freed += chunk.request.idle  # from now on it makes room for others

    def record(self, request: Request) -> None:
        """Record in the cache the tokens of a request that are known and queued."""
        if request.sequence is not None:
            known = min(request.queued, len(request.tokens))
            self.table.append(request.sequence, request.tokens[len(request.sequence.tokens) : known])

    def _keep_border(self, request: Request) -> None:
        """Keep what later requests need to start where the prompt ends, and then at each further page."""
        if request.sequence is not None:
            self.table.advance(request.sequence, request.queued)
            if request.queued >= self.table.border(len(request.tokens)):
                self.table.keep(request.sequence)

    def _decode_rows(self, before: ScheduledStep | None) -> list[Chunk | None] | None:
        """One row for each request that decodes; rows fed by `before` keep the order of its logits rows."""
        ordered = before.sampled if before else []
        others = [r for r in self.running if r.remaining == 1 and r.generated > 0 and r not in ordered]
        rows: list[Chunk | None] = []
        for request in [*ordered, *others]:
            # the request's mask depends on a token that has not been read
            unread = request in ordered and request.constraint is not None
            if unread or request.done or request.sequence is None or request.exhausted:
                if request in ordered:
                    rows.append(None)
                continue
            if not self._make_room(request, before):
                return None
            if request.sequence is not None:
                rows.append(Chunk(request, request.queued, 1, True))
        return [row for row in rows if row is None or row.request.sequence is not None]

    def _make_room(self, request: Request, before: ScheduledStep | None) -> bool:
        """Reserve the request's next position; requests admitted later may lose their pages for it.

        False: `before` must be read first.
        """
        while request.sequence is not None:
            made = self.table.reserve(request.sequence, request.queued + 1)
            if made is not None:
                self._copies += made
                break
            if before is not None:
                return False
            self._preempt(self.running[-1])
        return True

    def _preempt(self, request: Request) -> None:
        """Release a request's pages; it returns to the head of the queue and is computed again.

        If a request only holds its pages, that one releases them instead.
        """
        if self._drop_idle():
            return
        self.preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.queued = 0
        self.waiting.appendleft(request)

    def _drop_idle(self) -> bool:
        """Release the pages of a request that only holds them; False if there is none."""
        idle = next((request for request in self.running if request.idle), None)
        if idle is None:
            return False
        self.running.remove(idle)
        self._release(idle)
        return True

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.table.release(request.sequence)
            request.sequence = None

    def _prefill_wanted(self, before: ScheduledStep | None, decoding: int) -> list[Request]:
        """Running requests with positions left to compute, and as many waiting ones as can be admitted beside
        `decoding` decode rows.
        """
        fed = before.sampled if before else []
        wanted = [
            r
            for r in self.running
            if r not in fed and (r.remaining > 1 or r.generated == 0) and not r.exhausted
        ]
        for request in wanted:
            # before others are admitted, so that these cannot take the request's pages
            self._advance(request)
        rows = decoding + sum(r.remaining for r in wanted)
        kept = kept_rows(self.limits.max_rows)
        without_room: list[Request] = []
        for request in list(islice(self.waiting, LOOKED_AT)):
            if len(self.running) >= self.limits.max_logits and not self._drop_idle():
                break
            full = rows >= self.limits.max_rows
            if full and not (is_short(request.remaining, wanted[0].remaining) and request.remaining <= kept):
                continue
            if self._soon_cached(request):
                continue
            if request.no_room == self.table.freed or not (
                self._admit(request) or self._admit_for_idle(request)
            ):
                request.no_room = self.table.freed
                without_room.append(request)
                if request.overtaken >= OVERTAKEN:
                    break
                continue
            for other in without_room:
                other.overtaken += 1
            self.waiting.remove(request)
            self.running.append(request)
            wanted.append(request)
            rows += request.remaining
            kept -= request.remaining if full else 0
        return wanted

    def _computable(self, request: Request) -> int:
        """Rows of a prompt that are to be computed and have pages. No step goes beyond the prompt's last
        border.
        """
        assert request.sequence is not None
        border = self.table.border(len(request.tokens))
        rows = border - request.queued if request.queued < border else request.remaining
        return min(rows, self.table.writable(request.sequence) - request.queued)

    def _advance(self, request: Request) -> None:
        """Reserve pages for the next rows of a prompt as far as there is room: windows get their pages step
        by step.
        """
        assert request.sequence is not None
        soon = min(len(request.tokens), request.queued + self.limits.max_rows)
        made = self.table.reserve(request.sequence, self.table.reservable(request.sequence, soon))
        assert made is not None
        self._copies += made

    def _soon_cached(self, request: Request) -> bool:
        """Whether a request in prefill will leave a prefix that is worth waiting for."""
        if request.awaits is not None and self._leaves(*request.awaits):
            return True
        request.awaits = None
        for other in self.running:
            # The cheap check comes first: a comparison of tokens takes time in proportion to the prompt.
            if other.salt != request.salt or not self._leaves(other, len(other.tokens)):
                continue
            common = min(common_length(other.tokens, request.tokens), request.reusable + 1)
            if self._leaves(other, common):
                request.awaits = other, common
                return True
        return False

    def _leaves(self, other: Request, common: int) -> bool:
        """Whether a running request has still to compute more than a page of its first `common` tokens, which
        others can take then.
        """
        if other.sequence is None:
            return False
        common = self.table.leaves(len(other.tokens), common)
        return common >= self.table.page_size + other.sequence.computed

    def _admit(self, request: Request) -> bool:
        """Give the request a slot, the longest cached prefix, and pages for its tokens.

        Groups with a window get pages only for the next rows: they never need pages for all of a long prompt.
        """
        sequence = self.table.open(request.tokens[: request.reusable + 1], request.salt)
        if sequence is None:
            return False
        request.sequence = sequence
        self._borrow(request)
        assert request.sequence is not None
        soon = len(request.sequence.tokens) + self.limits.max_rows
        made = self.table.reserve(request.sequence, len(request.tokens), soon)
        # Keep one free page for each running request: otherwise this one would be preempted as soon as they
        # need it.
        if made is None or self.table.available < len(self.running):
            self._release(request)
            return False
        self._copies += made
        request.queued = len(request.sequence.tokens)
        if not request.admitted:
            request.admitted = time.monotonic()
            request.cached_tokens = request.queued
        return True

    def _admit_for_idle(self, request: Request) -> bool:
        """Admit a request in place of requests that only hold their pages."""
        while self._drop_idle():
            if self._admit(request):
                return True
        return False

    def _borrow(self, request: Request) -> None:
        """Start from a running request with the same beginning, if it shares more tokens than the prefix
        index.
        """
        assert request.sequence is not None
        best, shared = None, len(request.sequence.tokens)
        for other in self.running:
            if other.sequence is not None and other.salt == request.salt:
                common = common_length(other.sequence.tokens, request.tokens)
                common = self.table.shareable(other.sequence, min(common, request.reusable))
                if common > shared:
                    best, shared = other.sequence, common
        if best is None:
            return
        self.table.release(request.sequence)
        request.sequence = self.table.fork(best, shared)
        assert request.sequence is not None


def _better_together(before: ScheduledStep, chunks: Seq[Chunk | None]) -> bool:
    """Whether a step should wait for `before`, because it has only constrained requests to decode.

    Constrained requests in `before` can join it once `before` has been read; otherwise the two groups would
    alternate from then on.
    """
    coming = any(r.constraint is not None and not (r.done or r.exhausted) for r in before.sampled)
    return coming and all(chunk is None or chunk.request.constraint is not None for chunk in chunks)
