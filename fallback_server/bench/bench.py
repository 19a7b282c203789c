"""The bench: inspect the server, make the requests, apply the load level by level, and report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nearfar.fallback_server.bench import load, prompts, traces
from nearfar.fallback_server.bench.calibrate import Calibrated, look
from nearfar.fallback_server.bench.client import Ask, Client, Outcome
from nearfar.fallback_server.bench.figures import LevelFigures, level
from nearfar.fallback_server.bench.options import BenchOptions
from nearfar.fallback_server.bench.traces import Item
from nearfar.version import __version__

OPEN_REQUESTS = 256


@dataclass(frozen=True)
class BenchPlan:
    """A level to run. `load` is the concurrency of a closed loop, or the mean requests per second of an open
    loop (0 for a single request).
    """

    name: str
    mode: str
    load: float
    items: tuple[Item, ...]


@dataclass(frozen=True)
class BenchReport:
    """The results of a run."""

    options: BenchOptions
    server: Calibrated
    levels: tuple[LevelFigures, ...]
    interrupted: bool

    def record(self) -> dict[str, Any]:
        """The report as JSON values, without the API key."""
        options = asdict(replace(self.options, key=None))
        options["work"]["trace"] = self.options.work.trace.name if self.options.work.trace else None
        server = {
            **asdict(self.server),
            "words": {"overhead": self.server.words.overhead, "exact": self.server.words.exact},
        }
        levels = [asdict(one) for one in self.levels]
        return {
            "nearfar": __version__,
            "server": server,
            "options": options,
            "levels": levels,
            "interrupted": self.interrupted,
        }


class Watcher:
    """Callbacks for the bench's progress; this base class ignores them."""

    def looked(self, server: Calibrated) -> None:
        """Called when the server has been inspected."""

    def began(self, plan: BenchPlan) -> None:
        """Called when a level begins."""

    def done(self, outcome: Outcome) -> None:
        """Called when a request has ended."""

    def ended(self, figures: LevelFigures) -> None:
        """Called when a level has ended."""


def run(url: str, options: BenchOptions, watcher: Watcher | None = None) -> BenchReport:
    """Run the bench. Ctrl-C ends it, and the report holds the results so far."""
    return asyncio.run(measure(url, options, watcher or Watcher()))


async def measure(url: str, options: BenchOptions, watcher: Watcher) -> BenchReport:
    """Run the bench on the current event loop. See `run`."""
    client = Client(url, options)
    found: list[LevelFigures] = []
    try:
        server = await look(client)
        watcher.looked(server)
        for plan in plans(options, server):
            watcher.began(plan)
            run_ = await _level(client, plan, options, server, watcher.done)
            found.append(level(plan.name, plan.mode, plan.load, run_, options.slo))
            watcher.ended(found[-1])
            if run_.interrupted:
                break
    finally:
        await client.close()
    return BenchReport(options, server, tuple(found), bool(found) and found[-1].interrupted)


async def _level(
    client: Client,
    plan: BenchPlan,
    options: BenchOptions,
    server: Calibrated,
    done: Callable[[Outcome], None],
) -> load.LoadResult:
    # Each level has its own prompts, so that none finds another level's in the server's prefix cache.
    work = options.work
    asks = [
        Ask(
            prompts.text(server.words, item, index, work.shared_prefix, f"{work.seed} {plan.name}"),
            item.prompt_tokens,
            item.output_tokens,
        )
        for index, item in enumerate(plan.items)
    ]
    if plan.mode == "closed":
        return await load.closed(client, asks, int(plan.load), options.level_seconds, done)
    return await load.open_(client, asks, [item.at for item in plan.items], options.level_seconds, done)


def plans(options: BenchOptions, server: Calibrated) -> Iterator[BenchPlan]:
    """Yield the levels in the order in which they run."""
    work = options.work
    trace = traces.read_trace(work.trace) if work.trace is not None else None

    def fitted(items: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(traces.fit(items, work, server.context, server.words.overhead))

    if options.mode in ("closed", "both"):
        for concurrency in options.concurrency:
            count = options.count(concurrency)
            items = traces.sample(trace, work, count) if trace else traces.synthetic(work, count)
            yield BenchPlan(f"{concurrency} at once", "closed", concurrency, fitted(items))
    if options.mode in ("open", "both"):
        for rate in options.rates or (None,):
            count = options.requests or OPEN_REQUESTS
            items = traces.window(trace, work, count) if trace else traces.synthetic(work, count)
            items = traces.at_rate(items, rate)
            mean = (len(items) - 1) / items[-1].at if items[-1].at else 0.0
            yield BenchPlan(f"{mean:.3g} a second", "open", mean, fitted(items))
