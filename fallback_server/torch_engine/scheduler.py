"""Decides what the next step computes. It touches no tensors.

Continuous batching at the level of iterations (Yu et al., *Orca*, OSDI 2022): every step is planned again.
Running sequences decode, one row each; the remaining token budget goes to prompts, in chunks.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import merge

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.cache.sequences import Sequence
from nearfar.edge_runtime.engine.prefill import LOOKED_AT, OVERTAKEN, share_rows


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a step: sequences, and token rows of decode and prefill together.

    `whole_rows`: most prompt rows whose log-probabilities are requested, since each of them keeps its logits.
    `ageing`: seconds of waiting that one step of priority is worth.
    """

    max_running: int
    token_budget: int
    ageing: float = 10.0
    whole_rows: int = 1 << 30

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.token_budget:
            raise ValueError(
                f"max_running {self.max_running} must be at least 1, and token_budget "
                f"{self.token_budget} no less than it"
            )


@dataclass(eq=False)
class Work:
    """A sequence to complete: `tokens` are the prompt and the generated tokens; the first `computed` are in
    the cache.

    `cached` counts the prompt tokens that the prefix index had when the work was first admitted; None before.
    `overtaken` counts works that were admitted before this one since it found no room; `no_room` is the
    table's `freed` at that time. `whole`: every prompt row must be computed and its logits kept (prompt
    logprobs), from the row `whole_from` on; the prefix index is used
    before that row only. `pooled`: the prefix index is not used either, for a mean over
    the hidden states of all rows. Only works with the same `salt` share prefixes.
    """

    id: str
    tokens: list[int]
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    whole: bool = False
    whole_from: int = 0
    pooled: bool = False
    computed: int = 0
    cached: int | None = None
    overtaken: int = 0
    no_room: int = -1
    sequence: Sequence | None = None
    prompt_length: int = field(init=False)
    rank: tuple[float, int] = field(init=False, default=(0.0, 0))

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Rows to compute before the next token can be sampled."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True)
class WorkChunk:
    """Rows of one work in a step: `count` positions from `start`. `samples`: the last row's logits give the
    next token.

    `pages` hold positions 0 … start + count - 1. `known` are indices into `pages` of pages that another
    sequence has filled with the same tokens: this chunk's rows must not write there.
    """

    work: Work
    start: int
    count: int
    samples: bool
    pages: tuple[int, ...]
    known: frozenset[int] = frozenset()


class WorkScheduler:
    """Plans steps from waiting and running works, both sorted by rank.

    A rank is the arrival time plus `ageing` seconds for each step of priority, so everyone who arrives late
    enough ranks behind a waiting work: nobody starves. When pages run out, the running work of the last rank
    gives up its pages and is computed again later. The first in rank always continues, so there is always
    progress.

    A page enters the prefix index when its last row is planned, before it is computed: within a step every
    layer writes all rows before any row attends, so even rows of the same step may read it. So a failed step
    must end the cache (the worker dies and starts with an empty one).
    """

    def __init__(self, table: SequenceTable, limits: BatchLimits) -> None:
        self.table = table
        self.limits = limits
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.preemptions = 0
        self.prefix_hits = 0
        self.prefix_queries = 0
        self._works: dict[str, Work] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._works)

    def get(self, work_id: str) -> Work | None:
        """Return the work with this id, if it waits or runs; else None."""
        return self._works.get(work_id)

    def add(self, work: Work) -> None:
        """Queue a work. The caller has checked that its longest answer fits the cache."""
        if work.id in self._works:
            raise ValueError(f"there is a work {work.id!r} already")
        self._count += 1
        work.rank = (work.arrival + work.priority * self.limits.ageing, self._count)
        self._works[work.id] = work
        insort(self.waiting, work, key=_rank)

    def remove(self, work: Work) -> None:
        """Remove a work that is finished or cancelled. Its full pages stay in the prefix index while there is
        room.
        """
        del self._works[work.id]
        (self.waiting if work.sequence is None else self.running).remove(work)
        self._release(work)

    def schedule(self) -> list[WorkChunk]:
        """Plan the next step: decode rows, then prefill chunks. Empty where there is nothing to do.

        The rows count as computed from here on.
        """
        decode = [
            chunk for work in list(self.running) if work.remaining == 1 and (chunk := self._decode(work))
        ]
        return decode + self._prefill(self.limits.token_budget - len(decode))

    def _decode(self, work: Work) -> WorkChunk | None:
        """Plan one row of a running work, preempting works ranked behind it where needed; None if it was
        preempted itself.
        """
        while work.sequence is not None:
            if self._reserve(work):
                return self._plan(work, 1)
            self._preempt(self.running[-1])
        return None

    def _prefill(self, budget: int) -> list[WorkChunk]:
        """Plan chunks of prompts by rank, started ones and those that can be admitted now. What one leaves of
        its share goes to the next.
        """
        chunks: list[WorkChunk] = []
        whole = self.limits.whole_rows
        started = [work for work in self.running if work.remaining > 1]
        wanted = list(merge(started, self.waiting[:LOOKED_AT], key=_rank)) if budget else []
        without_room: list[Work] = []
        spare = 0
        for work, share in zip(wanted, share_rows([work.remaining for work in wanted], budget), strict=True):
            spare += share
            most = min(spare, whole) if work.whole else spare
            if most <= 0:
                continue
            if work.sequence is None:
                if any(other.overtaken >= OVERTAKEN for other in without_room) or not self._begin(work):
                    without_room.append(work)
                    continue
                for other in without_room:
                    other.overtaken += 1
            count = min(work.remaining, most)
            chunks.append(self._plan(work, count))
            spare -= count
            whole -= count if work.whole else 0
        return chunks

    def _begin(self, work: Work) -> bool:
        """Let a waiting work run if there is room. Returns whether it runs."""
        if len(self.running) >= self.limits.max_running or work.no_room == self.table.freed:
            return False
        if not self._admit(work):
            work.no_room = self.table.freed
            return False
        self.waiting.remove(work)
        insort(self.running, work, key=_rank)
        return True

    def _plan(self, work: Work, count: int) -> WorkChunk:
        sequence, start = work.sequence, work.computed
        assert sequence is not None
        before = list(sequence.pages)
        work.computed += count
        self.table.append(sequence, work.tokens[start : work.computed])
        self.table.publish(sequence, work.computed)
        held = self.table.pages_for(work.computed)
        known = frozenset(i for i in range(held) if sequence.pages[i] != before[i])
        return WorkChunk(work, start, count, work.remaining == 0, tuple(sequence.pages[:held]), known)

    def _admit(self, work: Work) -> bool:
        """Give the work its longest cached prefix, and pages for its tokens. Returns whether there was
        room.
        """
        found = work.tokens[: work.whole_from + 1] if work.whole else work.tokens
        sequence = self.table.open([] if work.pooled else found, work.salt)
        if sequence is None:
            return False
        work.sequence = sequence
        # One free page is kept for each running work: otherwise this work would be preempted as soon as
        # another needs one.
        if not self._reserve(work) or self.table.available < len(self.running):
            self._release(work)
            return False
        work.computed = len(sequence.tokens)
        if work.cached is None:
            work.cached = work.computed
            self.prefix_hits += work.computed
            self.prefix_queries += work.prompt_length
        return True

    def _reserve(self, work: Work) -> bool:
        assert work.sequence is not None
        copies = self.table.reserve(work.sequence, len(work.tokens))
        # Only whole pages are shared, so the next page to write is never shared and never needs a copy.
        assert not copies
        return copies is not None

    def _preempt(self, work: Work) -> None:
        self.running.remove(work)
        self._release(work)
        work.computed = 0
        self.preemptions += 1
        insort(self.waiting, work, key=_rank)

    def _release(self, work: Work) -> None:
        if work.sequence is not None:
            self.table.release(work.sequence)
            work.sequence = None


def _rank(work: Work) -> tuple[float, int]:
    return work.rank
