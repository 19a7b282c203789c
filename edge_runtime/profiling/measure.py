"""Times the launches of one plan of an artifact on its device, over several rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from nearfar.edge_runtime.artifact.budget import check_buffers, windows
from nearfar.edge_runtime.artifact.loading import checked, open_executor
from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.edge_runtime.artifact.trial import untried
from nearfar.edge_runtime.devices import Settings, parse_device
from nearfar.edge_runtime.engine.steps import StepWriter
from nearfar.edge_runtime.executors.base import Executor
from nearfar.edge_runtime.executors.planned import Profiled
from nearfar.edge_runtime.profiling.traffic import Traffic
from nearfar.errors import DeviceError, RequestError
from nearfar.format.buffers import page_table
from nearfar.format.manifest import Function, Manifest, Program
from nearfar.format.plans import Launch
from nearfar.format.sampler import COLUMNS, SampleF32, SampleI32
from nearfar.format.sizes import MAX_ROWS, pages_for


@dataclass(frozen=True)
class ProfileOptions:
    """The plan to time, and the number of rounds."""

    function: str = "step"
    """The name of the program's function."""
    rows: int | None = None
    """The function's bucket; the default is the smallest, which for `step` is decode."""
    context: int | None = None
    """Positions in the cache, including the rows' own; the default is 1,024, or the model's context if that
    is less.
    """
    rounds: int = 10
    """The number of timed rounds; figures are medians."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a kernel.

    `bytes`: the least that it must move (traffic.py). `share`: its part of the time of all launches.
    """

    kernel: str
    microseconds: float
    bytes: int
    share: float

    @property
    def gb_per_s(self) -> float:
        """Bytes by time; 0 if the clock is too coarse to measure the time."""
        return self.bytes / self.microseconds / 1e3 if self.microseconds else 0.0

    def record(self) -> dict[str, Any]:
        """The cost as a JSON record."""
        return vars(self) | {"gb_per_s": self.gb_per_s}


@dataclass(frozen=True, kw_only=True)
class LaunchCost(Cost):
    """The cost of one launch, of the program `variant`. `workgroups`: None on cpu."""

    function: str
    variant: str
    workgroups: int | None


@dataclass(frozen=True, kw_only=True)
class KernelCost(Cost):
    """The cost of all launches of one kernel."""

    launches: int


@dataclass(frozen=True)
class Profile:
    """The cost of a plan's launches, and the median and fastest wall time of the step without stamps."""

    model: str
    device: str
    variant: str
    function: str
    rows: int
    context: int
    rounds: int
    step_microseconds: float
    fastest_step_microseconds: float
    launches: tuple[LaunchCost, ...]

    @property
    def microseconds(self) -> float:
        """Microseconds of all launches."""
        return sum(launch.microseconds for launch in self.launches)

    @property
    def bytes(self) -> int:
        """Bytes of all launches."""
        return sum(launch.bytes for launch in self.launches)

    @property
    def kernels(self) -> tuple[KernelCost, ...]:
        """The launches summed by kernel, slowest kernel first."""
        by: dict[str, list[LaunchCost]] = {}
        for launch in self.launches:
            by.setdefault(launch.kernel, []).append(launch)
        costs = [
            KernelCost(
                kernel=kernel,
                microseconds=sum(launch.microseconds for launch in own),
                bytes=sum(launch.bytes for launch in own),
                share=sum(launch.share for launch in own),
                launches=len(own),
            )
            for kernel, own in by.items()
        ]
        return tuple(sorted(costs, key=lambda cost: -cost.microseconds))

    def record(self) -> dict[str, Any]:
        """The profile as a JSON record."""
        record = {name: value for name, value in vars(self).items() if name != "launches"}
        totals = {"launches_microseconds": self.microseconds, "bytes": self.bytes}
        lists = {"kernels": [cost.record() for cost in self.kernels]}
        return record | totals | lists | {"launches": [cost.record() for cost in self.launches]}


class _Timed(Executor, Profiled, Protocol):
    """An executor of plans."""


def profile(path: Path, load: LoadOptions, options: ProfileOptions) -> Profile:
    """Time the launches of a plan. RequestError if the options do not fit the artifact.

    Each round runs the step once as the engine would, and once with stamps.
    """
    artifact, device = checked(path, load)
    _check_plans(artifact)
    which, manifest = parse_device(load.device)[1], artifact.manifest
    found = device.probe(which)
    programs = artifact.able_programs(found, load.precision, load.program, load.kv_bits)
    program = untried(programs, found.adapter)
    bucket = _bucket(program, options)
    rows, context = _sizes(manifest, bucket, options)
    pages = tuple(window.most_columns(rows, context) for window in windows(manifest))
    check_buffers(manifest, program, pages, context, found.memory)
    settings = Settings(pages, context, load.threads, None, which, load.debug, timed=True)
    executor = cast(_Timed, open_executor(device, artifact, program, settings))
    try:
        prepare(executor, manifest, program, rows, pages, context)
        times, walls = _measure(executor, program, options.function, bucket.size, options.rounds)
    finally:
        executor.close()
    launches = artifact.plan(bucket).launches
    traffic = Traffic(artifact, program, bucket, context)
    return Profile(
        manifest.model.name, executor.name, program.name, options.function, bucket.size, context,
        options.rounds, statistics.median(walls) * 1e6, min(walls) * 1e6,
        tuple(_costs(options.function, program.name, launches, times, traffic)),
    )  # fmt: skip


def _check_plans(artifact: Artifact) -> None:
    functions = (
        f for program in artifact.manifest.programs for each in program.functions.values() for f in each
    )
    if any(function.plan is None for function in functions):
        raise DeviceError(
            f"{artifact.target} has no launches to measure: it builds a graph at each step, and its library "
            "fuses that as it likes. Measure an artifact with plans (cpu, vulkan, webgpu)"
        )


def _bucket(program: Program, options: ProfileOptions) -> Function:
    """The requested bucket; RequestError if the artifact does not have it."""
    functions = program.functions
    if options.function not in functions:
        raise RequestError(
            f"the artifact has no function {options.function!r}, only {', '.join(functions)}", "function"
        )
    buckets = {bucket.size: bucket for bucket in functions[options.function]}
    rows = min(buckets) if options.rows is None else options.rows
    if rows not in buckets:
        near = min(buckets, key=lambda size: abs(size - rows))
        raise RequestError(
            f"{options.function} has no bucket of {rows} rows; the nearest is {near}, of "
            f"{', '.join(map(str, sorted(buckets)))}",
            "rows",
        )
    if options.rounds < 1:
        raise RequestError(f"rounds must be at least 1, not {options.rounds}", "rounds")
    return buckets[rows]


def _sizes(manifest: Manifest, bucket: Function, options: ProfileOptions) -> tuple[int, int]:
    """Rows of the step, and positions in the cache; RequestError if they do not fit the model."""
    rows, longest = bucket.size, manifest.model.context_length
    context = min(1024, longest) if options.context is None else options.context
    if context > longest:
        raise RequestError(f"{context:,} tokens: the model's context is {longest:,}", "context")
    if context < rows:
        raise RequestError(f"{rows} rows do not fit into a context of {context:,} tokens", "context")
    return rows, context


def prepare(
    executor: Executor, manifest: Manifest, program: Program, rows: int, pages: Iterable[int], context: int
) -> None:
    """Write a step's inputs: `rows` consecutive positions of one sequence, of which the last
    makes `context`. Steps of more than MAX_ROWS rows are those of a prompt, which need one row of logits.

    The tokens are random, the same each time; the sampler has temperature, top-k and top-p.
    """
    for write in StepWriter(manifest, program, feed=False).initial():
        executor.write(write.buffer, write.data)
    tokens = np.random.default_rng(0).integers(0, manifest.model.vocab_size, rows)
    executor.write("tokens", tokens.astype(np.int32))
    executor.write("positions", np.arange(context - rows, context, dtype=np.int32))
    executor.write("slots", np.zeros(rows, np.int32))
    wanted = np.arange(MAX_ROWS) % rows if rows <= MAX_ROWS else np.full(MAX_ROWS, rows - 1)
    executor.write("logit_rows", wanted.astype(np.int32))
    columns = np.arange(pages_for(context, manifest.cache.page_size), dtype=np.int32)[None]
    for group, count in enumerate(pages):
        executor.write(page_table(group), columns % count)
    floats, ints = np.zeros((MAX_ROWS, COLUMNS), np.float32), np.zeros((MAX_ROWS, COLUMNS), np.int32)
    floats[:, [SampleF32.TEMPERATURE, SampleF32.TOP_P, SampleF32.REPETITION_PENALTY]] = 1, 0.9, 1
    ints[:, SampleI32.SLOT] = np.arange(MAX_ROWS) % manifest.cache.slots
    ints[:, [SampleI32.TOP_K, SampleI32.FEED]] = 40, -1
    if manifest.model.task == "generate":
        executor.write("sample_f32", floats)
        executor.write("sample_i32", ints)


def _measure(
    executor: _Timed, program: Program, function: str, size: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Median seconds of each launch over the rounds, and seconds of the whole step in each; after one warm-up
    round.
    """
    if function != "step":  # the other functions read the logits of a step
        executor.run("step", min(b.size for b in program.functions["step"] if b.rows >= size))
    times, walls = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        executor.run(function, size)
        executor.fetch("sampled" if "greedy" in program.functions else "embedding", 1)()
        walls.append(time.perf_counter() - start)
        times.append(executor.profile(function, size))
    return [statistics.median(own) for own in zip(*times[1:], strict=True)], walls[1:]


def _costs(
    function: str, variant: str, launches: Iterable[Launch], times: list[float], traffic: Traffic
) -> Iterable[LaunchCost]:
    total = sum(times) or 1.0
    for launch, seconds in zip(launches, times, strict=True):
        yield LaunchCost(
            kernel=launch.kernel,
            microseconds=seconds * 1e6,
            bytes=traffic.of(launch),
            share=seconds / total,
            function=function,
            variant=variant,
            workgroups=int(np.prod(launch.grid)) if launch.grid else None,
        )
