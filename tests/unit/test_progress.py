"""What a command shows during a wait: nothing for a short one, a changing line on a terminal, plain lines
elsewhere.
"""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from nearfar.cli import options, progress
from nearfar.cli.progress import Bars, Pace, Shown, bytes_bar, waiting
from nearfar.edge_runtime.progress import Progress
from tests.support.artifacts import Built

PATIENCE = 60


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without CI and without forced colours."""
    for name in ("CI", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait counts as a long one."""
    for name in ("MOMENT", "FIRST", "EVERY"):
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(progress, "LOOK", 0.001)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Clock:
    """A clock that advances only on request."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Looks(Clock):
    """A clock that advances on request, from one check of a watching thread to the next."""

    def __init__(self) -> None:
        self._asleep, self._woken = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        """Let the watching thread sleep until the test wants another check."""
        self._asleep.release()
        self._woken.acquire()
        self.now += seconds

    def look(self, times: int) -> None:
        """Let the watching thread check this many times; all checks but the last are over when this
        returns.
        """
        for _ in range(times):
            assert self._asleep.acquire(timeout=PATIENCE)
            self._woken.release()

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        self._woken.release(1000)  # nothing stops the watching thread any more


def gone() -> None:
    """Wait until no thread shows anything any more."""
    for thread in threading.enumerate():
        if thread.name == "nearfar-progress":
            thread.join(PATIENCE)
            assert not thread.is_alive()


def piped() -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file), file.getvalue


def terminal() -> tuple[Console, Callable[[], str]]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file.getvalue


def test_what_is_over_in_a_moment_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for console, text in (piped(), terminal()):
        with monkeypatch.context() as patched, Looks() as clock:
            patched.setattr(progress, "time", clock)
            with Shown(console) as shown:
                shown(Progress("checking", 0, 100))
                shown(Progress("kernels", 1, 8))
                clock.look(2)  # the clock has shown 0.2 s of a moment of 0.3 s
                shown(Progress("kernels", 8, 8))
        gone()
        assert text() == ""


@pytest.mark.usefixtures("quick")
def test_a_pipe_gets_plain_lines_and_each_says_how_far_it_is() -> None:
    console, text = piped()
    shown = Shown(console)
    shown(Progress("kernels", 3, 57))
    until(lambda: "compiling kernels, 3 of 57 …\n" in text())
    shown(Progress("prompt", 1024, 20480))
    until(lambda: "reading the prompt, 1,024 of 20,480 tokens …\n" in text())
    shown(Progress("prompt", 20480, 20480))
    before = text()
    gone()
    assert text() == before
    assert "\x1b" not in before
    assert "\r" not in before


@pytest.mark.usefixtures("quick")
def test_a_terminal_gets_one_line_that_is_gone_before_the_answer_comes() -> None:
    console, text = terminal()
    shown = Shown(console)
    shown(Progress("prompt", 256, 2048))
    until(lambda: "reading the prompt, 256 of 2,048 tokens" in text())
    shown(Progress("prompt", 2048, 2048))
    assert text().endswith("\x1b[2K"), "the line is erased"
    assert text().count("\x1b[?25l") == text().count("\x1b[?25h"), "the cursor is there again"


@pytest.mark.usefixtures("quick")
def test_a_terminal_that_cannot_change_a_line_gets_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console, text = terminal()
    with Shown(console) as shown:
        shown(Progress("loading"))
        until(lambda: "loading the weights …\n" in text())
    assert "\x1b" not in text()


@pytest.mark.usefixtures("quick")
def test_a_build_and_bytes_in_a_pipe_say_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console, text = piped()
    with Bars(console) as bars:
        bars.report("compiling", 3, 14)
        until(lambda: "compiling, 3 of 14 …" in text())
    seen = ""

    def saw(line: str) -> bool:
        nonlocal seen
        seen += capsys.readouterr().err
        return line in seen

    with bytes_bar("saving x.snap") as told:
        told(5_000_000, 20_000_000)
        until(lambda: saw("saving x.snap, 5 of 20 MB …"))
    with waiting("compiling and timing kernels"):
        until(lambda: saw("compiling and timing kernels …"))


def test_bars_leave_room_for_what_ctrl_c_echoes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    with Bars(console) as bars:
        bars.report("a stage of a build", 0, 0)
        bars.report("a stage of a build", 3, 73)
    drawn = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    lines = re.split(r"[\r\n]+", drawn)
    assert any(" 3/73" in line for line in lines)
    assert max(map(len, lines)) == 57


@pytest.mark.usefixtures("quick")
def test_lines_may_go_to_a_log(caplog: pytest.LogCaptureFixture) -> None:
    console, text = terminal()
    log = logging.getLogger("test")
    with (
        caplog.at_level(logging.INFO),
        Shown(console, lambda line: log.info("waiting for: %s", line)) as shown,
    ):
        shown(Progress("kernels", 0, 8))
        until(lambda: "waiting for: compiling kernels, 0 of 8" in caplog.text)
    assert text() == ""


@pytest.mark.usefixtures("quick")
def test_a_load_and_a_prompt_that_take_long_are_shown(
    built: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    with options.load_engine(built("stories260K", "none") / "cpu", threads=1, kv_memory="8MB") as engine:
        assert "checking the files" in capsys.readouterr().err
        prompts = ([1, *(5 + (number + first) % 200 for number in range(500))] for first in range(200))

        def seen() -> bool:
            with engine.generate(next(prompts)) as stream:
                next(iter(stream))
            return "reading the prompt" in capsys.readouterr().err

        until(seen)
    with pytest.raises(Exception, match="no such"):
        options.load_engine(Path("no such artifact"), threads=1)
    capsys.readouterr()
    gone()
    assert capsys.readouterr().err == ""


@pytest.fixture
def tty() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    for each in (ours, theirs):
        os.close(each)


def test_colours_are_left_out_where_nobody_wants_them(tty: tuple[int, int]) -> None:
    """With NO_COLOR on a real terminal the line changes, and has no colours."""
    ours, theirs = tty
    code = (
        "import threading; from nearfar.cli import progress; progress.MOMENT = 0\n"
        "drawn, draw = threading.Event(), progress.Shown._draw\n"
        "progress.Shown._draw = lambda shown: (draw(shown), drawn.set())\n"
        "with progress.waiting('compiling'): assert drawn.wait(30)"
    )
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True, timeout=PATIENCE)
    seen = os.read(ours, 65536).decode()
    assert "compiling" in seen
    assert "\x1b[3" not in seen
    assert "\x1b[38" not in seen


def test_the_pace_of_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(), []
    monkeypatch.setattr(progress, "time", clock)
    pace = Pace(lambda line: lines.append((round(clock.now - 1000, 1), line)))
    pace.begin()
    for tenth in range(1, 302):
        clock.now = 1000 + tenth / 10
        pace.look("starting" if tenth < 120 else f"packing, {tenth // 100} of 3")
    pace.end("packing, 3 of 3")
    assert lines[0] == (0.8, "starting …"), "within a second"
    assert len({line for _, line in lines}) == len(lines), "none twice"
    times = [at for at, _ in lines]
    assert all(later - earlier >= 4.99 for earlier, later in pairwise(times[:-1]))
    assert [line for _, line in lines][1:4] == ["starting, 6 s …", "starting, 11 s …", "packing, 1 of 3 …"]
    assert lines[-1] == (30.1, "packing, 3 of 3: 30.1 s")
    del lines[:]
    pace.begin()
    clock.now += 0.5
    pace.look("packing")
    pace.end("packing")
    assert lines == [], "of what was short, nothing"


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("FORCE_COLOR", "1")])
def test_a_log_is_no_terminal(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not progress.shows(Console(file=io.StringIO(), force_terminal=True))


@pytest.mark.usefixtures("quick")
def test_the_last_line_is_of_what_came_to_its_end() -> None:
    console, text = piped()
    with Shown(console) as shown:
        shown.show("packing, 1 of 2")
        until(lambda: "packing, 1 of 2 …\n" in text())
        shown.show("packing, 2 of 2")
    assert re.search(r"packing, 2 of 2: \d+\.\d s\n$", text())
    before = len(text())
    shown.show("reading")
    until(lambda: "reading …\n" in text()[before:])
    shown.__exit__(KeyboardInterrupt)
    assert re.fullmatch(r"(reading.* …\n)+", text()[before:])
