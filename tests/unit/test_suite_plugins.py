"""The plugins of this test suite: turns, groups of workers, measured times, budgets."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import budgets, times, turns
from tests.support.paths import ROOT
from tests.support.proxy import Proxy
from tests.support.times import Spent, Times, cpu_seconds, tables

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from tests.support import groups, times, turns

def pytest_configure(config):
    config.addinivalue_line("markers", "in_turns(names): see turns")
    times.install(config)

def pytest_collection_modifyitems(config, items):
    if (number := turns.turn()) is not None:
        items[:], left = turns.select(items, number)
        config.hook.pytest_deselected(items=left)
"""
PRODUCT = """
import pytest
from tests.support.turns import in_turns

@in_turns("target", "precision")
@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("target", ["webgpu", "vulkan"])
@pytest.mark.parametrize("case", range(6))
def test_product(case, target, precision): pass

def test_always(): pass
"""


@pytest.fixture(autouse=True)
def settled(pytester: pytest.Pytester) -> None:
    """Set an option of pytest-asyncio, which warns without it."""
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")


@pytest.fixture
def product(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_cases=PRODUCT)
    return pytester


def chosen(pytester: pytest.Pytester, turn: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[str]:
    """Node ids of the tests that run in a turn."""
    monkeypatch.setenv(turns.VARIABLE, turn)
    found = pytester.inline_run("--collect-only", "-q", "-p", "no:cacheprovider", *more).getcalls(
        "pytest_collection_finish"
    )
    return [item.nodeid.rpartition("::")[2] for item in found[-1].session.items]


def test_each_turn_runs_each_case_and_each_combination(
    product: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    for turn in range(4):
        names = chosen(product, str(turn), monkeypatch)
        assert "test_always" in names
        made = [name for name in names if name != "test_always"]
        inside = [name.partition("[")[2][:-1].split("-") for name in made]
        assert [case for case, *_ in inside] == list("012345")
        assert {(target, precision) for _, target, precision in inside} == {
            (t, p) for t in ("webgpu", "vulkan") for p in ("f32", "f16")
        }
        assert not seen & set(made), "a turn repeats nothing of the turns before it"
        seen |= set(made)
    assert len(seen) == 24
    assert len(chosen(product, turns.ALL, monkeypatch)) == 25


def test_a_turn_is_the_same_again_and_what_is_named_runs(
    product: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(product, "3", monkeypatch) == chosen(product, "3", monkeypatch)
    for precision in ("f32", "f16"):
        node = f"test_cases.py::test_product[2-vulkan-{precision}]"
        assert chosen(product, "3", monkeypatch, node) == [node.rpartition("::")[2]]


def test_params_of_a_fixture_meet_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()
    for turn in range(3):
        monkeypatch.setenv(turns.VARIABLE, str(turn))
        pairs = turns.paired("abcd", (1, 2, 3))
        assert [first for first, _ in pairs] == list("abcd")
        assert {second for _, second in pairs} == {1, 2, 3}
        met |= set(pairs)
    assert len(met) == 12
    monkeypatch.setenv(turns.VARIABLE, turns.ALL)
    assert set(turns.paired("abcd", (1, 2, 3))) == met


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_share_is_of_all_kinds_and_shares_together_are_all(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    cases, met = [(size, group) for size in range(9) for group in range(parts)], []
    for turn in range(7, 7 + parts):
        monkeypatch.setenv(turns.VARIABLE, str(turn))
        shared = turns.share(cases, parts)
        assert {group for _, group in shared} == set(range(parts))
        assert len(shared) == 9
        met += shared
    assert sorted(met) == cases
    monkeypatch.setenv(turns.VARIABLE, turns.ALL)
    assert turns.share(cases, parts) == cases


def test_a_share_has_some_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, met = ["a1", "b1", "b2", "a2", "c1", "b3", "d1"], []
    for turn in (4, 5):
        monkeypatch.setenv(turns.VARIABLE, str(turn))
        shared = turns.share(cases, 2, lambda case: case[0])
        assert {"a", "b"} <= {case[0] for case in shared}
        met += shared
    assert sorted(met) == sorted(cases)


def test_the_commit_decides_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    assert turns.turn() == turns.turn()
    assert f"{turns.VARIABLE}={turns.turn()} repeats it" in turns.told()
    other = subprocess.CompletedProcess([], 0, stdout="ab" * 20 + "\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: other)
    assert turns.turn() == int("ab" * 20, 16) % 5040
    monkeypatch.setenv(turns.VARIABLE, turns.ALL)
    assert turns.turn() is None
    monkeypatch.setenv(turns.VARIABLE, "some")
    with pytest.raises(ValueError, match="give a number that a run printed, or all"):
        turns.turn()


def test_a_parameter_that_a_test_lacks_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("from tests.support.turns import in_turns\n@in_turns('device')\ndef test_a(): pass")
    monkeypatch.setenv(turns.VARIABLE, "0")
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.stderr.fnmatch_lines(["*test_a has no parameter device*"])


def test_a_decrease_of_cpu_seconds_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a process whose parent does not wait for it vanish when it ends."""
    recorder = times.Recorder()
    with monkeypatch.context() as patched:  # Not longer: the recorder of this run uses it, too.
        patched.setattr(times, "cpu_seconds", lambda: 0.0)
        making = recorder.pytest_runtest_makereport()
        next(making)
        with pytest.raises(StopIteration) as end:
            making.send(SimpleNamespace())
    assert end.value.value.spent[0] == 0


def test_times_are_of_tests_files_and_fixtures_with_children(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import subprocess, sys, pytest
        BURN = "import time\\nwhile time.process_time() < 0.6: pass"
        @pytest.fixture
        def burnt():
            exec(BURN)
        def test_child(): subprocess.run([sys.executable, "-c", BURN], check=True)
        def test_idle(burnt): pass
        """
    )
    path = pytester.path / "times.json"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("NEARFAR_TEST_TIMES", str(path))
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2").assert_outcomes(passed=2)
    times = Times.load(path)
    (file,) = times.files
    assert times.files[file].cpu == pytest.approx(sum(each.cpu for each in times.tests.values()))
    child = next(spent for name, spent in times.tests.items() if name.endswith("test_child"))
    assert 0.4 < child.cpu < 3
    assert times.collection > 0.1
    assert f"| {file} |" in tables(times)


def test_running_processes_are_read_seldom_and_after_each_that_ended() -> None:
    """To read the threads of a browser takes milliseconds, and each fixture of each test asks."""
    now, readings = [0.0], list[float]()

    def read() -> float:
        now[0] += 0.002
        readings.append(now[0])
        return float(len(readings))

    descendants = times.Descendants(read, lambda: now[0], lambda: now[0])
    assert [descendants.seconds(0.0) for _ in range(100)] == [1.0] * 100
    now[0] += 0.09
    assert descendants.seconds(0.0) == 1.0
    assert descendants.seconds(0.5) == 2.0  # a child ended: its seconds must not count twice
    now[0] += 0.11
    assert descendants.seconds(0.5) == 3.0  # the reading was old


def test_a_closed_proxy_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    proxy = Proxy(9)
    accepting = [thread for thread in set(threading.enumerate()) - before if "_accept" in thread.name]
    proxy.close()
    for thread in accepting:
        thread.join(60)
    assert [thread.is_alive() for thread in accepting] == [False]


def test_cpu_seconds_grow_with_work() -> None:
    before = cpu_seconds()
    while cpu_seconds() == before:
        pass
    assert cpu_seconds() > before


def test_a_file_over_its_budget_is_named_and_three_times_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "PATH", tmp_path / "budgets.json")
    monkeypatch.setattr(budgets, "load", lambda: json.loads((tmp_path / "budgets.json").read_text()))
    # the machine is half as fast as the reference
    monkeypatch.setattr(budgets, "calibration", lambda: 2 * budgets.REFERENCE)
    (tmp_path / "budgets.json").write_text('{"a.py": 10, "b.py": 100}')
    run = tmp_path / "run.json"

    def check(**cpu: float) -> tuple[int, str]:
        spent = {f"{name}.py::test": {"cpu": seconds, "wall": 1.0} for name, seconds in cpu.items()}
        run.write_text(json.dumps({"tests": spent}))
        status = budgets.main([str(run)])
        return status, "".join(capsys.readouterr())

    assert check(a=19, b=150) == (0, "all 2 test files are within their budgets\n")
    status, told = check(a=50, b=150)
    assert status == 0
    assert "a.py: 50 CPU seconds, 2.5 times its budget of 10" in told
    status, told = check(a=81, b=150)
    assert status == 1
    assert "make the tests cheaper" in told
    # three times the budget, but by 41 seconds of a machine that is half as fast
    status, told = check(a=61, b=150)
    assert (status, "make the tests cheaper" in told) == (0, False)
    status, told = check(c=9)
    assert (status, "c.py: 9 CPU seconds, 1.1 times its budget of 4" in told) == (0, True)


def test_written_budgets_leave_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "PATH", tmp_path / "budgets.json")
    run = tmp_path / "run.json"
    spent = {"a.py::x": {"cpu": 9.0, "wall": 1.0}, "a.py::y": {"cpu": 1.0, "wall": 1.0}}
    run.write_text(json.dumps({"tests": {**spent, "b.py::x": {"cpu": 1.0, "wall": 1.0}}}))
    assert budgets.main(["--write", str(run)]) == 0
    assert json.loads((tmp_path / "budgets.json").read_text()) == {"a.py": 15}
    assert budgets.spent_by_file([Times(tests={"a.py::x": Spent(1, 2)})] * 2) == {"a.py": 2}
