"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from nearfar.folders import HOME
from tests.support import certificates, groups, times, turns
from tests.support.artifacts import Built
from tests.support.kept import use_kept

# Tests run artifacts that another session built, or that they altered. Tests of trust remove this variable.
os.environ.setdefault("NEARFAR_TRUST", "1")

# A software GPU takes long to compile kernels, so tests wait only for the kernels of their own requests.
os.environ.setdefault("NEARFAR_READY", "no")

# Content-addressed results are shared by all tests, and by the next session: `nearfar-tests` in the user's
# folder for caches, which can be deleted at any time.
use_kept(os.environ)
certificates.share()

# A shell without job control starts background commands with SIGINT ignored, and children inherit that: the
# tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a home of its own, so that no test reads or writes the user's keys, lists, models and
    caches.
    """
    times.install(config)
    if not hasattr(config, "workerinput"):  # workers inherit the folder
        home = tempfile.mkdtemp(prefix="nearfar-tests-home-")
        os.environ[HOME] = home
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, and leave what was imported and collected out of later
    garbage collections: half a CPU second of each full one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # torch and other modules that tests import late are in every full collection: with Python's own 700,
        # these take an eighth of the CPU seconds of small tests.
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: workers wait for servers, browsers and each other's builds."""
    return (os.cpu_count() or 1) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(turns.told())


ALONE = ("e2e/test_ray", "e2e/test_soak")
"""Tests that take the whole machine (servers under load): `make test` runs two files of them at a time, after
the others. A processor idles while they run, so a test that only waits for events, however long, does not
belong here.
"""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`, leave out files without such tests: to import all files takes 15 CPU seconds."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(Path(__file__).parent).as_posix()
    return None if path.startswith(ALONE) or "mark.alone" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (number := turns.turn()) is not None:
        items[:], left = turns.select(items, number)
        config.hook.pytest_deselected(items=left)
    root = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(root) and item.path.relative_to(root).as_posix().startswith(ALONE):
            item.add_marker("alone")
    if hasattr(config, "workerinput"):
        groups.arrange(items)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`built("classics-7M", "q4")` gives the OUT folder of that build, which is made once a session.

    NEARFAR_TEST_ARTIFACTS names a folder in which builds are kept from session to session.
    """
    kept = os.environ.get("NEARFAR_TEST_ARTIFACTS")
    return Built(Path(kept) if kept else tmp_path_factory.mktemp("artifacts"))
