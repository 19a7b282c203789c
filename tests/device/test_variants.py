"""Trials of programs for classes of GPUs, on a software GPU that pretends to be unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nearfar.build.pipeline import BuildOptions, build
from nearfar.edge_runtime import Engine
from nearfar.edge_runtime.artifact import trial, variants
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.trial import Steps, all_of, open_best
from nearfar.edge_runtime.artifact.variants import ProgramChoice
from nearfar.edge_runtime.devices import Device, Settings, device
from nearfar.edge_runtime.executors.base import Executor
from nearfar.errors import DeviceError, DeviceLost
from nearfar.format.adapters import Adapter, class_of
from nearfar.format.manifest import Program
from nearfar.kernels.buckets import Buckets
from tests.support.backends import require
from tests.support.paths import ROOT
from tests.support.turns import in_turns, paired

pytestmark = in_turns("artifact")
"""Both targets are tested for the same properties: a run takes each test on one of them."""
UNKNOWN = Adapter("", "", "a GPU that nobody knows", "1.0", "other")
SETTINGS = Settings((8,), 128)
STEPS = ((1, 4), (1,))
"""Rows of the steps of an artifact, in turns. Trials call 4 rows large here: compiling steps of 16 rows for
four programs takes 15 CPU seconds, longer than all the tests.
"""


@pytest.fixture(
    scope="module", params=paired(("vulkan", "webgpu"), STEPS), ids=lambda made: f"{made[0]}-{made[1][-1]}"
)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The sample with programs for an unknown GPU's class and the neighbouring class."""
    target, steps = request.param
    require(target)
    classes = ("integrated", "discrete")
    options = BuildOptions(
        str(ROOT / "examples/sample-model"), tmp_path_factory.mktemp("built"), (target,), "q4",
        buckets=Buckets(steps, (1,)), device_classes=classes,
    )  # fmt: skip
    return Artifact.open(build(options)[0])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARFAR_HOME", str(tmp_path))
    monkeypatch.setattr(variants, "SLOW", 1e9)  # a busy machine must not end a trial
    monkeypatch.setattr(variants, "BUDGET", 1e9)


def opener(artifact: Artifact, opened: list[Program]) -> Callable[[Program], Executor]:
    """A function like the one that load uses, with few pages; it records the programs that it opens."""

    def open_one(program: Program) -> Executor:
        opened.append(program)
        return device(artifact.target).open(artifact, program, SETTINGS)

    return open_one


def room(_: Program) -> int:
    """The number of positions in the executors of `opener`."""
    return SETTINGS.context


def best(artifact: Artifact, opened: list[Program], changed: Device | None = None) -> tuple[str, Any]:
    """The program that runs, and why, after one step."""
    programs = artifact.able_programs(device(artifact.target).probe())
    executor, program, choice = open_best(
        artifact, programs, UNKNOWN, changed or device(artifact.target), opener(artifact, opened), room
    )
    assert executor.program_name == program.name == choice.program
    assert Steps(executor, program, SETTINGS.context).run("decode") > 0
    executor.close()
    return program.name, choice


def test_finalists_are_tried_once_and_the_choice_is_kept(artifact: Artifact) -> None:
    finalists = ["integrated-f16", "integrated-f32", "discrete-f16"]
    opened: list[Program] = []
    name, choice = best(artifact, opened)
    assert choice.why == "timed"
    assert list(choice.seconds) == finalists
    assert all(steps["decode"] > 0 and steps["large"] > 0 for steps in choice.seconds.values())
    of = {program.name: program for program in artifact.manifest.programs}
    assert opened[0].requires == all_of([of[each] for each in finalists])
    assert [program.name for program in opened] == list(dict.fromkeys(["integrated-f16", name]))
    opened.clear()
    again, kept = best(artifact, opened)
    assert (again, kept.why, kept.seconds) == (name, "kept", {})
    assert [program.name for program in opened] == [name]


def test_a_trial_stays_where_the_smallest_cache_has_room(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = device(artifact.target).open(artifact, artifact.manifest.programs[0], SETTINGS)
    written: list[int] = []
    write = type(opened).write

    def noting(executor: Executor, buffer: str, data: Any, row: int = 0, column: int = 0) -> None:
        if buffer == "positions":
            written.extend(data.tolist())
        write(executor, buffer, data, row, column)

    monkeypatch.setattr(type(opened), "write", noting)
    opened.close()
    assert best(artifact, [])[1].why == "timed"
    assert max(written) == SETTINGS.context - 1


def test_a_program_that_loses_the_device_is_out_for_good(artifact: Artifact) -> None:
    own = device(artifact.target)
    beside = own.beside
    assert beside is not None

    def losing(main: Executor, opened: Artifact, program: Program, settings: Settings) -> Executor:
        if program.name == "integrated-f32":
            raise DeviceLost("the driver was reset")
        return beside(main, opened, program, settings)

    _, choice = best(artifact, [], replace(own, beside=losing))
    assert list(choice.seconds) == ["integrated-f16", "discrete-f16", "discrete-f32"]
    _, choice = best(artifact, [])
    assert choice.why == "kept"


@pytest.mark.parametrize("error", [DeviceError("no room"), ValueError("a kernel of the driver's is not one")])
def test_a_program_that_fails_in_its_trial_is_passed_over_this_time(
    artifact: Artifact, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> Executor:
        raise error

    name, choice = best(artifact, [], replace(device(artifact.target), beside=full))
    assert (name, choice.why) == ("integrated-f16", "only")
    assert f"integrated-f32 is passed over: {type(error).__name__}: {error}" in caplog.text
    assert list(best(artifact, [])[1].seconds) == ["integrated-f16", "integrated-f32", "discrete-f16"]


def test_a_winner_that_has_no_room_as_it_would_run_is_not_kept(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "compare", lambda names, measure: ProgramChoice(names[-1], "timed"))
    programs = artifact.able_programs(device(artifact.target).probe())

    def open_one(program: Program) -> Executor:
        if program.name == "discrete-f16":
            raise DeviceError("no room for its cache")
        return device(artifact.target).open(artifact, program, SETTINGS)

    for why in ("timed", "kept"):  # the kept choice is the program that ran
        executor, program, choice = open_best(
            artifact, programs, UNKNOWN, device(artifact.target), open_one, room
        )
        executor.close()
        assert (program.name, choice.why) == ("discrete-f32", why)


def test_the_first_is_passed_over_too_where_it_does_not_open(artifact: Artifact) -> None:
    opened: list[Program] = []
    programs = artifact.able_programs(device(artifact.target).probe())

    def open_one(program: Program) -> Executor:
        if program.name == "integrated-f16":
            raise RuntimeError("the driver's compiler gave up")
        return opener(artifact, opened)(program)

    own = device(artifact.target)
    executor, program, choice = open_best(artifact, programs, UNKNOWN, own, open_one, room)
    executor.close()
    assert list(choice.seconds) == ["integrated-f32", "discrete-f16", "discrete-f32"]
    assert program.name in choice.seconds


def test_software_times_nothing(artifact: Artifact) -> None:
    adapter = device(artifact.target).probe().adapter
    if adapter is None or class_of(adapter) != "software":
        pytest.skip(f"{adapter} is not software")
    with Engine.load(artifact.path, device=artifact.target, kv_memory="4MB") as engine:
        assert str(engine.asynchronous.core.choice) == "software"


def test_a_pin_is_followed(artifact: Artifact) -> None:
    with Engine.load(
        artifact.path, device=artifact.target, kv_memory="4MB", program="discrete-f32"
    ) as engine:
        core = engine.asynchronous.core
        assert (core.executor.program_name, str(core.choice)) == ("discrete-f32", "pinned")
