"""Replays the scripts of tests/vectors/schedule on the Python scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nearfar.edge_runtime.cache import SequenceTable
from nearfar.edge_runtime.engine.requests import Request, ScoredRow
from nearfar.edge_runtime.engine.sampling_params import SamplingParams
from nearfar.edge_runtime.engine.scheduler import ScheduledStep, Scheduler, StepLimits
from nearfar.errors import ContextError

FILE = Path(__file__).parents[1] / "vectors" / "schedule" / "scenarios.json"
TOKEN = 7


class Replay:
    """A scheduler that follows a script, and the requests by their names."""

    def __init__(self, config: dict[str, Any]) -> None:
        windows = tuple(config.get("windows", [None] * len(config["pages"])))
        table = SequenceTable(tuple(config["pages"]), config["page_size"], config["slots"], windows)
        limits = StepLimits(tuple(config["buckets"]), config["slots"], config["context"])
        self._scheduler = Scheduler(table, limits)
        self._requests: dict[str, Request] = {}
        self._flying: ScheduledStep | None = None

    def run(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Run an entry of the script; gives the entry in its recorded form."""
        scheduler = self._scheduler
        match entry:
            case {"add": name, "prompt": ranges, "limit": limit}:
                prompt = tuple(first + at for first, count in ranges for at in range(count))
                rows = () if limit else (ScoredRow(len(prompt) - 1, ()),)
                sampling = SamplingParams(temperature=0)
                made = Request(prompt, sampling, limit, 0, scored=rows, held=not limit)
                self._requests[name] = made
                scheduler.add(made)
            case {"cancel": name}:
                scheduler.remove(self._requests[name])
            case {"shrink": size}:
                smaller = scheduler.limits.below(size)
                assert smaller is not None
                scheduler.shrink(smaller)
                return {**entry, "left": self._left()}
            case {"limit": (prompt, asked)}:
                try:
                    return {**entry, "gives": scheduler.limit_tokens(range(prompt), asked)}
                except ContextError:
                    return {**entry, "gives": None}
            case {"turn": _}:
                return {**entry, "turn": self._turn(), "left": self._left()}
            case {"ahead": _}:
                return {**entry, "ahead": self._ahead(), "left": self._left()}
            case _:
                raise ValueError(f"unknown entry {entry}")
        return entry

    def _turn(self) -> dict[str, Any] | None:
        assert self._flying is None
        step = self._queued(None)
        if step is not None:
            self._read(step)
        return self._launch(step)

    def _ahead(self) -> dict[str, Any] | None:
        before, self._flying = self._flying, self._queued(self._flying)
        if before is not None:
            self._read(before)
        return self._launch(self._flying)

    def _queued(self, before: ScheduledStep | None) -> ScheduledStep | None:
        step = self._scheduler.schedule(before)
        if step is not None:
            self._scheduler.queue(step)
        return step

    def _read(self, step: ScheduledStep) -> None:
        self._scheduler.publish(step)
        for request in step.sampled:
            if request.done:
                continue
            request.accept(TOKEN)
            self._scheduler.record(request)
            if len(request.tokens) - len(request.prompt) == request.limit:
                self._scheduler.remove(request)

    def _launch(self, step: ScheduledStep | None) -> dict[str, Any] | None:
        if step is None:
            return None
        names = {id(request): name for name, request in self._requests.items()}
        rows = [
            None if c is None else [names[id(c.request)], c.start, c.count, c.samples] for c in step.chunks
        ]
        return {"size": step.size, "rows": rows, "fed": step.fed, "copies": [list(c) for c in step.copies]}

    def _left(self) -> list[str]:
        names = {id(request): name for name, request in self._requests.items()}
        return [names[id(request)] for request in (*self._scheduler.running, *self._scheduler.waiting)]
