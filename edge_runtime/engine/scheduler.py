"""Decides what the next step computes: rows of which requests, in which bucket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

from nearfar.edge_runtime.cache import Copy, SequenceTable, common_length
from nearfar.edge_runtime.engine.prefill import LOOKED_AT, OVERTAKEN, is_short, kept_rows, share_rows
from nearfar.edge_runtime.engine.requests import Request
from nearfar.errors import ContextError

MORE_ROOM = ", or give the cache more memory if the model allows it"


@dataclass(frozen=True)
class Limits:
    """What fits in a step and in a sequence. `buckets` are the sizes of `step`, smallest first."""

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

    def below(self, size: int) -> Limits | None:
        """The limits of steps smaller than a bucket; None where it is the smallest."""
        smaller = tuple(bucket for bucket in self.buckets if bucket < size)
        if not smaller:
            return None
        return replace(self, buckets=smaller, max_logits=min(self.max_logits, smaller[-1]))

    def prefill_rows(self, decode: int, wanted: int) -> int:
        """How many of the wanted prefill rows to take beside the decode rows.

        Padding costs as much as work: rather than run a bucket more than half empty, fill the one below and
        leave the rest to the next step. Up to 16 rows a step costs about one pass over the weights, full or
        not.
        """
        total = min(decode + wanted, self.max_rows)
        size = self.bucket(total)
        below = max((smaller for smaller in self.buckets if smaller < size), default=0)
        if below >= 16 and total * 2 <= size and below > decode:
            total = below
        return total - decode


@dataclass(frozen=True)
class Chunk:
    """Rows of one request: `count` positions from `start`. If `samples`, the last row's logits give its
    next token.
    """

    request: Request
    start: int
    count: int
    samples: bool


@dataclass(frozen=True)
class Step:
    """One step: chunks in row order, None standing for one padding row; and the page copies to do before it.

    The first `fed` rows take their tokens from the sampler of the step before.
    """

    size: int
    chunks: tuple[Chunk | None, ...]
    fed: int
    copies: tuple[Copy, ...]

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token, in the order of their logits rows."""
        return [chunk.request for chunk in self.chunks if chunk is not None and chunk.samples]


class Scheduler:
    """Waiting requests in order of arrival, running ones in order of admission.

    Running requests decode first; what room is left in a step is shared by prompts (prefill.py). When pages
    run out, the request admitted last gives up its pages and is computed again later.
    """

    def __init__(self, table: SequenceTable, limits: Limits) -> None:
        self.table = table
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._copies: list[Copy] = []  # page copies that the next step must make first

    @property
    def free_tokens(self) -> int:
        """Tokens that new requests could put into the cache now, be it one or a full context in each slot."""
        everything = self.limits.context * self.limits.max_logits
        return self.table.longest(self.limits.max_rows, everything, now=True)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def limit_tokens(self, prompt: Seq[int], max_tokens: int | None) -> int:
        """How many tokens an answer to the prompt may have; refuses a prompt that leaves room for none."""
        context = self.limits.context
        if len(prompt) >= context:
            raise ContextError(len(prompt), context, "prompt", advice=MORE_ROOM)
        room = context - len(prompt)
        return room if max_tokens is None else min(max_tokens, room)

    def check_length(self, text: Seq[int]) -> None:
        """Refuse a text of which nothing is to be written, but that does not fit the context."""
        if len(text) > self.limits.context:
            raise ContextError(len(text), self.limits.context, "input", what="input", advice=MORE_ROOM)

    def remove(self, request: Request) -> None:
        """Forget a request that is finished or cancelled; its pages stay in the prefix index while there
        is room.
        """
        request.done = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def restart(self) -> None:
        """What the cache holds is void: running requests wait again, in their order, to be computed from
        the tokens known.
        """
        for request in reversed(self.running):
            self._release(request)
            request.queued = request.pending = 0
            self.waiting.appendleft(request)
        self.running.clear()
        self._copies.clear()
        self.table.forget()

    def shrink(self, limits: Limits) -> None:
        """Take smaller steps from now on, between which nothing is under way. Who no longer fits in one
        waits.
        """
        self.limits = limits
        while len(self.running) > limits.max_logits:
            self._preempt(self.running[-1])

    def put_back(self, step: Step) -> None:
        """A step that was planned is not taken now; what it was to copy falls to the next one."""
        self._copies[:0] = step.copies

    def schedule(self, before: Step | None) -> Step | None:
        """Plan the next step. `before` is the step in flight whose tokens have not been read, if any.

        None: there is nothing to do, or nothing can be done before `before` has been read.
        """
        chunks = self._decode_rows(before)
        if chunks is None:
            return None
        wanted, decoding = self._prefill_wanted(before), len(chunks)
        budget = self.limits.prefill_rows(len(chunks), sum(r.remaining for r in wanted)) if wanted else 0
        for request, take in zip(wanted, share_rows([*map(self._computable, wanted)], budget), strict=True):
            if take > 0:
                chunks.append(Chunk(request, request.queued, take, take == request.remaining))
        if not any(chunks):
            if wanted and before is None:
                self._preempt(self.running[-1])  # prompts wait for each other's pages
                return self.schedule(None)
            return None
        if before and len(chunks) == decoding and _better_together(before, chunks):
            return None
        rows = sum(chunk.count if chunk else 1 for chunk in chunks)
        fed = len(before.sampled) if before else 0
        return Step(self.limits.bucket(rows), tuple(chunks), fed, self.take_copies())

    def take_copies(self) -> tuple[Copy, ...]:
        """The page copies that are due; whoever takes them makes them before anything else."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def queue(self, step: Step) -> None:
        """The step is on its way to the device: the next step is planned as if its rows were computed."""
        for chunk in step.chunks:
            if chunk is not None:
                chunk.request.queued += chunk.count
                chunk.request.pending += chunk.samples
                self.record(chunk.request)

    def publish(self, step: Step) -> None:
        """The step has been read: others may start from the pages that it filled."""
        for chunk in step.chunks:
            if chunk is not None and chunk.request.sequence is not None:
                self.table.publish(chunk.request.sequence, chunk.start + chunk.count)
                chunk.request.read = chunk.start + chunk.count

    def record(self, request: Request) -> None:
        """Tell the cache the tokens that are known and queued."""
        if request.sequence is not None:
            known = min(request.queued, len(request.tokens))
            self.table.append(request.sequence, request.tokens[len(request.sequence.tokens) : known])

    def _decode_rows(self, before: Step | None) -> list[Chunk | None] | None:
        """One row for each request that decodes; those fed by `before` stay in the order of its logits
        rows.
        """
        ordered = before.sampled if before else []
        others = [r for r in self.running if r.remaining == 1 and r.generated > 0 and r not in ordered]
        rows: list[Chunk | None] = []
        for request in [*ordered, *others]:
            unread = request in ordered and request.constraint is not None  # its next token hangs on this one
            if unread or request.done or request.sequence is None or request.exhausted:
                if request in ordered:
                    rows.append(None)
                continue
            if not self._make_room(request, before):
                return None
            if request.sequence is not None:
                rows.append(Chunk(request, request.queued, 1, True))
        return [row for row in rows if row is None or row.request.sequence is not None]

    def _make_room(self, request: Request, before: Step | None) -> bool:
        """Reserve the request's next position, at the cost of requests admitted later. False: read
        `before` first.
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
        """Give up a request's pages; it goes back to the head of the queue and is computed again."""
        self.preemptions += 1
        self.running.remove(request)
        self._release(request)
        request.queued = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self.table.release(request.sequence)
            request.sequence = None

    def _prefill_wanted(self, before: Step | None) -> list[Request]:
        """Running requests with positions left to compute, then as many waiting ones as can be admitted."""
        fed = before.sampled if before else []
        wanted = [
            r
            for r in self.running
            if r not in fed and (r.remaining > 1 or r.generated == 0) and not r.exhausted
        ]
        for request in wanted:
            self._advance(request)  # before others are admitted: they must not take its pages
        rows = sum(r.remaining for r in wanted)
        kept = kept_rows(self.limits.max_rows)
        without_room: list[Request] = []
        for request in list(islice(self.waiting, LOOKED_AT)):
            if len(self.running) >= self.limits.max_logits:
                break
            full = rows >= self.limits.max_rows
            if full and not (is_short(request.remaining, wanted[0].remaining) and request.remaining <= kept):
                continue
            if self._soon_cached(request):
                continue
            if request.no_room == self.table.freed or not self._admit(request):
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
        """Rows of a prompt that are to be computed, as far as there are pages for them."""
        assert request.sequence is not None
        return min(request.remaining, self.table.writable(request.sequence) - request.queued)

    def _advance(self, request: Request) -> None:
        """Reserve the next rows of a prompt, as far as there is room: windows get their pages step by
        step.
        """
        assert request.sequence is not None
        soon = min(len(request.tokens), request.queued + self.limits.max_rows)
        made = self.table.reserve(request.sequence, self.table.reservable(request.sequence, soon))
        assert made is not None
        self._copies += made

    def _soon_cached(self, request: Request) -> bool:
        """Whether a request being prefilled will leave a prefix that is worth waiting for."""
        if request.awaits is not None and self._leaves(*request.awaits):
            return True
        request.awaits = None
        for other in self.running:
            # First what costs nothing: comparing takes as long as the prompt.
            if other.salt != request.salt or not self._leaves(other, len(other.tokens)):
                continue
            common = common_length(other.tokens, request.tokens)
            if self._leaves(other, common):
                request.awaits = other, common
                return True
        return False

    def _leaves(self, other: Request, common: int) -> bool:
        """Whether a running request has yet to compute a page and more of its first `common` tokens."""
        computed = other.sequence.computed if other.sequence else 0
        return other.sequence is not None and common >= self.table.page_size + computed

    def _admit(self, request: Request) -> bool:
        """Give the request a slot, the longest prefix that the cache has, and pages for its tokens.

        In groups with a window only for the next rows: it never needs pages for all of a long prompt.
        """
        sequence = self.table.open(request.tokens, request.salt)
        if sequence is None:
            return False
        request.sequence = sequence
        self._borrow(request)
        assert request.sequence is not None
        soon = len(request.sequence.tokens) + self.limits.max_rows
        made = self.table.reserve(request.sequence, len(request.tokens), soon)
        # A page in hand for each running request: else this one would be preempted as soon as they need it.
        if made is None or self.table.available < len(self.running):
            self._release(request)
            return False
        self._copies += made
        request.queued = len(request.sequence.tokens)
        if not request.admitted:
            request.admitted = time.monotonic()
            request.cached_tokens = request.queued
        return True

    def _borrow(self, request: Request) -> None:
        """Start from a running request with the same beginning, if that saves more than the index does."""
        assert request.sequence is not None
        best, shared = None, len(request.sequence.tokens)
        for other in self.running:
            if other.sequence is not None and other.salt == request.salt:
                common = common_length(other.sequence.tokens, request.tokens)
                common = min(common, other.sequence.computed, len(request.tokens) - 1)
                if common > shared and common >= self.table.least_length(other.sequence):
                    best, shared = other.sequence, common
        if best is None:
            return
        self.table.release(request.sequence)
        fork = self.table.fork(best)
        assert fork is not None
        self.table.truncate(fork, shared)
        request.sequence = fork


def _better_together(before: Step, chunks: Seq[Chunk | None]) -> bool:
    """Whether a step has only constrained requests to decode, while others that go on are in the step before:
    these come along once that has been read, where else the two would take turns from then on.
    """
    coming = any(r.constraint is not None and not (r.done or r.exhausted) for r in before.sampled)
    return coming and all(chunk is None or chunk.request.constraint is not None for chunk in chunks)
