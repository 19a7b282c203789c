"""Renders the report in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nearfar.fallback_server.bench.bench import BenchPlan, BenchReport, Watcher
from nearfar.fallback_server.bench.calibrate import Calibrated
from nearfar.fallback_server.bench.client import Outcome
from nearfar.fallback_server.bench.figures import Distribution, LevelFigures


class LevelBars(Watcher):
    """A progress bar for each level."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("{task.fields[errors]}", style="red"))  # fmt: skip
        self.progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._errors = 0

    def looked(self, server: Calibrated) -> None:
        """See Watcher."""
        self.progress.console.print(f"{server.model} at {server.url}", markup=False)
        for note in server.notes:
            self.progress.console.print(note, style="yellow", markup=False)

    def began(self, plan: BenchPlan) -> None:
        """See Watcher."""
        self._errors = 0
        self._task = self.progress.add_task(plan.name, total=len(plan.items), errors="")

    def done(self, outcome: Outcome) -> None:
        """See Watcher."""
        assert self._task is not None
        self._errors += outcome.error is not None
        self.progress.update(self._task, advance=1, errors=f"{self._errors} failed" if self._errors else "")

    def ended(self, figures: LevelFigures) -> None:
        """See Watcher."""
        if self._task is not None:
            self.progress.stop_task(self._task)


def view(report: BenchReport) -> Group:
    """Render throughput, latencies and remarks of a report."""
    slo = report.options.slo
    rates = Table(title=report.server.model, box=box.SIMPLE)
    for name in ("load", "ended well", "req/s", "answer tokens/s", "cached", "goodput, req/s"):
        rates.add_column(name, justify="left" if name == "load" else "right")
    times = Table(title="milliseconds", box=box.SIMPLE)
    for name in ("load", "", "p50", "p95", "p99", "max"):
        times.add_column(name, justify="right" if name.startswith(("p", "m")) else "left")
    for one in report.levels:
        rates.add_row(
            one.name,
            f"{one.ok} of {one.requests}",
            f"{one.requests_per_second:.2f}",
            f"{one.output_tokens_per_second:.1f}",
            f"{one.cached_part:.0%}",
            f"{one.goodput:.2f} ({one.good:.0%})",
        )
        kinds = {"TTFT": one.ttft, "TPOT": one.tpot, "between pieces": one.itl, "end to end": one.e2e}
        for index, (kind, summary) in enumerate(kinds.items()):
            times.add_row("" if index else one.name, kind, *_ms(summary), end_section=index == len(kinds) - 1)
    goal = f"Goodput: ended well with TTFT ≤ {slo.ttft:g} s and TPOT ≤ {slo.tpot:g} s."
    return Group(rates, times, *(Text(line) for line in (goal, *remarks(report))))


def remarks(report: BenchReport) -> list[str]:
    """Remarks on the figures, as plain sentences."""
    said = list(report.server.notes)
    for one in report.levels:
        said += [
            f"{one.name}: {count} x {kind}. {one.examples.get(kind, '')}".strip()
            for kind, count in one.errors.items()
        ]
        if one.short_answers:
            said.append(f"{one.name}: {one.short_answers} answers were shorter than requested.")
        if one.lag.p99 > 0.05:
            said.append(
                f"{one.name}: this client was {one.lag.p99 * 1000:.0f} ms late (p99), so the client may be "
                "the bottleneck."
            )
    if report.interrupted:
        said.append(
            f"Stopped early: {report.levels[-1].unfinished} requests were in progress and do not count."
        )
    return said


def _ms(summary: Distribution) -> list[str]:
    values = (summary.p50, summary.p95, summary.p99, summary.max)
    return [f"{value * 1000:.{0 if value >= 0.1 else 1}f}" if summary.count else "–" for value in values]
