"""Loads an artifact on a GPU with its fastest program: the first load times the finalists."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import numpy as np

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.trial_notes import TrialNotes
from nearfar.edge_runtime.artifact.variants import Candidate, ProgramChoice, StepKind, Why, compare, line_up
from nearfar.edge_runtime.devices import Device, Settings
from nearfar.edge_runtime.executors.base import Executor
from nearfar.edge_runtime.progress import Teller
from nearfar.errors import DeviceLost
from nearfar.format.adapters import Adapter, class_of
from nearfar.format.manifest import Manifest, Program, Requires
from nearfar.format.sampler import COLUMNS, SampleI32
from nearfar.format.seal import FIELD
from nearfar.format.sizes import MAX_ROWS

log = logging.getLogger(__name__)

POSITION = 255
"""The position of a trial's decode steps in their sequence."""

Open = Callable[[Program], Executor]
Context = Callable[[Program], int]
"""Returns the most positions of a sequence in a program that is opened."""


def untried(programs: Sequence[Program], adapter: Adapter | None) -> Program:
    """The program that runs without a trial."""
    return line_up(programs, None if adapter is None else class_of(adapter))[0]


def open_best(
    artifact: Artifact,
    programs: Sequence[Program],
    adapter: Adapter | None,
    device: Device,
    open_one: Open,
    context: Context,
    tell: Teller | None = None,
) -> tuple[Executor, Program, ProgramChoice]:
    """Open an executor of the program that suits the adapter best. `programs` are those that the adapter can
    run.
    """
    device_class = None if adapter is None else class_of(adapter)
    if len(programs) == 1 or adapter is None or device_class == "software" or device.beside is None:
        program = untried(programs, adapter)
        why: Why = "only" if len(programs) == 1 else "first" if device_class is None else "software"
        return open_one(program), program, ProgramChoice(program.name, why)
    kept = TrialNotes(str(artifact.data.get(FIELD)), adapter)
    failed: set[str] = set()
    while True:
        finalists = line_up(programs, device_class, {*kept.lost, *failed})
        choice = known(finalists, kept, failed)
        if choice is not None:
            chosen = next(program for program in finalists if program.name == choice.program)
            return open_one(chosen), chosen, choice
        if tell is not None:
            tell("trying")
        tried = _try_all(artifact, finalists, device, kept, open_one, context, failed)
        if tried is not None:
            return tried


def known(
    finalists: Sequence[Candidate], kept: TrialNotes, failed: Collection[str] = ()
) -> ProgramChoice | None:
    """The choice if no trial is needed, else None. If all finalists have failed, the first one is chosen."""
    names = [program.name for program in finalists]
    if len(names) == 1 or {*names} & {*kept.lost, *failed}:
        return ProgramChoice(names[0], "only")
    before = kept.chosen(names)
    if before is not None:
        return ProgramChoice(before, "kept")
    return ProgramChoice(names[0], "busy") if kept.busy else None


def _try_all(
    artifact: Artifact,
    finalists: Sequence[Program],
    device: Device,
    kept: TrialNotes,
    open_one: Open,
    context: Context,
    failed: set[str],
) -> tuple[Executor, Program, ProgramChoice] | None:
    """Time the finalists over one copy of the weights; the first is opened as it will run, the others reuse
    its weights.

    None if one of them fails: it is added to `failed`, and the caller lines up the others again. A lost
    device is noted on disk; a lack of memory is not, since memory may suffice the next time.
    """
    first, *others = finalists
    names = [program.name for program in finalists]
    assert device.beside is not None
    try:
        main = open_one(dataclasses.replace(first, requires=all_of(finalists)))
    except Exception as error:
        _pass_over(first.name, error, failed)
        return None
    small = _small(artifact.manifest)
    positions = min(context(first), small.context)
    with ExitStack() as stack:
        stack.callback(main.close)
        try:
            made = {first.name: main}
            for program in others:
                kept.trying(program.name)
                made[program.name] = device.beside(main, artifact, program, small)
                stack.callback(made[program.name].close)
            steps = {program.name: Steps(made[program.name], program, positions) for program in finalists}

            def measure(name: str, kind: StepKind) -> float:
                kept.trying(name)
                return steps[name].run(kind)

            choice = compare(names, measure)
        except Exception as error:
            name = kept.tried or first.name
            if isinstance(error, DeviceLost):
                kept.lose(name)
            else:
                kept.stop()
            _pass_over(name, error, failed)
            return None
        except BaseException:
            kept.stop()
            raise
        if choice.program == first.name:
            kept.keep(names, first.name)
            for executor in list(made.values())[1:]:
                executor.close()
            stack.pop_all()
            return main, first, choice
        kept.stop()
    winner = next(program for program in finalists if program.name == choice.program)
    try:
        executor = open_one(winner)
    # the program has too little memory to run: a kept choice would take it again at every load
    except Exception as error:
        _pass_over(winner.name, error, failed)
        return None
    kept.keep(names, winner.name)
    return executor, winner, choice


def _pass_over(name: str, error: Exception, failed: set[str]) -> None:
    """Note a failed program and log the failure, which a user of another program would never see."""
    log.warning("the program %s is passed over: %s: %s", name, type(error).__name__, error)
    failed.add(name)


def all_of(programs: Sequence[Program]) -> Requires:
    """The features and limits that a device needs to run all of the programs."""
    features = sorted({feature for program in programs for feature in program.requires.features})
    limits: dict[str, int] = {}
    for program in programs:
        for name, value in program.requires.limits.items():
            limits[name] = max(value, limits.get(name, 0))
    return Requires(tuple(features), limits)


def _small(manifest: Manifest) -> Settings:
    """Settings with the smallest cache for a trial's step: all positions share one page."""
    return Settings((1,) * len(manifest.groups), min(POSITION + 1, manifest.model.context_length))


class Steps:
    """Runs and times whole steps of one executor, until the host has the token.

    Requests cannot see traces of the steps: page tables stay as they are, and the contents of unused pages do
    not count. `context`: positions that the executor has room for.
    """

    def __init__(self, executor: Executor, program: Program, context: int) -> None:
        self._executor = executor
        steps = [bucket.size for bucket in program.functions["step"]]
        self._sizes: dict[StepKind, int] = {"decode": steps[0], "large": steps[-1]}
        self._last = min(POSITION, context - 1)
        sampler = program.functions.get("greedy")
        self._rows = sampler[0].size if sampler else None
        """Bucket of the sampler; None if the model gives embeddings."""
        self._end = "sampled" if sampler else "embedding"

    def run(self, kind: StepKind) -> float:
        """Run one step and return its seconds."""
        executor, size = self._executor, self._sizes[kind]
        positions = np.arange(size, dtype=np.int32) if kind == "large" else np.full(size, POSITION, np.int32)
        sample = np.zeros((MAX_ROWS, COLUMNS), np.int32)
        sample[:, SampleI32.FEED] = -1
        executor.write("tokens", np.zeros(size, np.int32))
        executor.write("positions", np.minimum(positions, self._last))
        executor.write("slots", np.zeros(size, np.int32))
        executor.write("logit_rows", np.zeros(MAX_ROWS, np.int32))
        if self._rows is not None:
            executor.write("sample_i32", sample)
        executor.fetch(self._end, 1)()  # wait until the device is idle before the clock starts
        begin = time.perf_counter()
        executor.run("step", size)
        if self._rows is not None:
            executor.run("greedy", self._rows)
        executor.fetch(self._end, 1)()
        return time.perf_counter() - begin
