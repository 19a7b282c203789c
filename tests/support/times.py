"""pytest plugin: CPU seconds (child processes included) beside wall time, per test, file and fixture.

The run writes one JSON file, which `python -m tests.support.times FILE…` prints as tables (`make
test-times`). Workers of pytest-xdist attach their measurements to the test reports, which reach the
controller.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

FILE = "NEARFAR_TEST_TIMES"
"""Environment variable: the JSON file to write. Without it nothing is written."""


@dataclass
class Spent:
    """CPU and wall seconds."""

    cpu: float = 0.0
    wall: float = 0.0

    def add(self, other: Spent) -> None:
        """Add another measurement to this one."""
        self.cpu += other.cpu
        self.wall += other.wall


@dataclass
class Times:
    """Measurements of one pytest run."""

    processor: str = ""
    wall: float = 0.0
    collection: float = 0.0
    """CPU seconds of imports and collection, all processes together."""
    tests: dict[str, Spent] = field(default_factory=dict)
    """Set-up, call and tear-down together, by node id."""
    fixtures: dict[str, Spent] = field(default_factory=dict)
    """Set-up without that of the fixtures that it needs, by `scope name`."""

    @property
    def files(self) -> dict[str, Spent]:
        """Measurements summed by test file."""
        found: dict[str, Spent] = {}
        for node, spent in self.tests.items():
            found.setdefault(node.partition("::")[0], Spent()).add(spent)
        return found

    @classmethod
    def load(cls, path: Path) -> Times:
        """Read what a run wrote."""
        told = json.loads(path.read_text())
        for name in ("tests", "fixtures"):
            told[name] = {key: Spent(**value) for key, value in told.get(name, {}).items()}
        return cls(**told)


class Descendants:
    """CPU seconds of the running descendants of this process.

    A reading takes 10 us for each thread of each process: 2 ms beside a browser, and tests with their
    fixtures ask ten times each. So a reading is used again for `KEPT` times as long as it took. It is not
    used after a child was waited for, because the seconds of that child are then among those of ended
    children.
    """

    KEPT = 50

    def __init__(
        self, read: Callable[[], float], clock: Callable[[], float], cost: Callable[[], float]
    ) -> None:
        self._read, self._clock, self._cost = read, clock, cost
        self._seconds = self._until = 0.0
        self._ended = -1.0

    def seconds(self, ended: float) -> float:
        """The seconds, where ended children have taken `ended`."""
        if ended != self._ended or self._clock() >= self._until:
            start = self._cost()
            self._seconds, self._ended = self._read(), ended
            self._until = self._clock() + self.KEPT * (self._cost() - start)
        return self._seconds


DESCENDANTS = Descendants(lambda: sum(_running(os.getpid())), time.perf_counter, time.thread_time)


def cpu_seconds() -> float:
    """User and system seconds of this process, of its ended children, and of its running descendants."""
    own = os.times()
    ended = own.children_user + own.children_system
    return own.user + own.system + ended + DESCENDANTS.seconds(ended)


def _running(pid: int) -> Iterator[float]:
    """CPU seconds of each running descendant and its ended children (Linux; elsewhere nothing)."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            try:
                stat = Path(f"/proc/{child}/stat").read_text()
            except OSError:
                continue
            ticks = stat.rpartition(")")[2].split()[
                11:15
            ]  # utime, stime, cutime, cstime: proc(5), fields 14 to 17
            yield sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            yield from _running(int(child))


def processor() -> str:
    """The name of the processor, and the number of processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


class Recorder:
    """Runs in every process: measures, and attaches what it measured to reports."""

    def __init__(self) -> None:
        self._start = self._last = cpu_seconds()
        self._clock = time.perf_counter()
        self._nested: list[Spent] = []
        self._fixtures: list[tuple[str, Spent]] = []
        self.collection = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._last = cpu_seconds()
        own = os.times()
        self.collection = own.user + own.system  # the time includes imports of pytest itself
        self._clock = time.perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        cpu, clock = cpu_seconds(), time.perf_counter()
        self._nested.append(Spent())
        try:
            return (yield)
        finally:
            inner = self._nested.pop()
            whole = Spent(cpu_seconds() - cpu, time.perf_counter() - clock)
            if self._nested:
                self._nested[-1].add(whole)
            own = Spent(whole.cpu - inner.cpu, whole.wall - inner.wall)
            self._fixtures.append((f"{fixturedef.scope} {fixturedef.argname}", own))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        cpu, clock = cpu_seconds(), time.perf_counter()
        # A process that ends without its parent asking for it (those of a closed browser) takes its seconds
        # along: tests have counted them while it ran, so a decrease counts as 0.
        report.spent = [max(0.0, cpu - self._last), clock - self._clock]
        report.fixtures = [(name, max(0.0, spent.cpu), spent.wall) for name, spent in self._fixtures]
        self._last, self._clock, self._fixtures = cpu, clock, []
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["collection_cpu"] = self.collection


class Collector:
    """Runs in the controller (or the only process): sums up and writes the file."""

    def __init__(self, path: Path | None, recorder: Recorder) -> None:
        self._path = path
        self._recorder = recorder
        self._clock = time.perf_counter()
        self.times = Times(processor())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not hasattr(report, "spent"):
            return
        node = report.nodeid.partition("@")[0] if "@" in report.nodeid.rpartition("]")[2] else report.nodeid
        cpu, wall = report.spent
        self.times.tests.setdefault(node, Spent()).add(Spent(cpu, wall))
        for name, cpu, wall in report.fixtures:
            self.times.fixtures.setdefault(name, Spent()).add(Spent(cpu, wall))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.times.collection += getattr(node, "workeroutput", {}).get("collection_cpu", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.times.collection += self._recorder.collection
        self.times.wall = time.perf_counter() - self._clock
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(asdict(self.times)))


def install(config: pytest.Config) -> Collector | None:
    """Register the plugin; returns the collector, or None in a worker of pytest-xdist."""
    recorder = Recorder()
    config.pluginmanager.register(recorder, "nearfar-times")
    if hasattr(config, "workerinput"):
        return None
    path = os.environ.get(FILE)
    collector = Collector(Path(path) if path else None, recorder)
    config.pluginmanager.register(collector, "nearfar-times-collector")
    return collector


def tables(times: Times, most: int = 40) -> str:
    """Markdown tables of files, fixtures and single tests, the most expensive first, at most `most` rows
    each.
    """
    total = sum(spent.cpu for spent in times.tests.values())
    lines = [
        f"{times.processor}: {len(times.tests):,} tests, {times.wall / 60:.1f} minutes, "
        f"{total:,.0f} CPU seconds in tests, {times.collection:,.0f} in collection"
    ]
    for title, table in (("file", times.files), ("fixture", times.fixtures), ("test", times.tests)):
        ranked = sorted(table.items(), key=lambda item: -item[1].cpu)[:most]
        lines += ["", f"| {title} | CPU s | wall s |", "|---|---:|---:|"]
        lines += [f"| {name} | {spent.cpu:.1f} | {spent.wall:.1f} |" for name, spent in ranked]
    return "\n".join(lines)


def main() -> None:
    """Print the tables of the files that are named on the command line."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.support.times FILE… (files that a test run wrote)")
    for name in sys.argv[1:]:
        print(f"\n## {name}\n\n{tables(Times.load(Path(name)))}")


if __name__ == "__main__":
    main()
