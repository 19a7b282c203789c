"""`nearfar bench kernels`: what each launch of a step costs on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nearfar.cli.bench_table import plot, view
from nearfar.cli.models import Kept, kept
from nearfar.cli.options import LOAD, DeviceName, KvBits, Precision, ProgramName, Threads, Trust
from nearfar.cli.progress import waiting
from nearfar.edge_runtime.artifact.options import LoadOptions
from nearfar.edge_runtime.profiling.measure import ProfileOptions, profile
from nearfar.errors import RequestError

DEFAULTS = ProfileOptions()

Function = Annotated[
    str, typer.Option(help="The function whose plan is timed: step, greedy, sample or logprobs.")
]
Rows = Annotated[
    int | None,
    typer.Option(
        help="The bucket: the number of rows of the step, which are consecutive tokens of one sequence. "
        "Default: the smallest, 1, which is decode; 256 is prefill."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens in the cache that attention reads, the step's own included. "
        "Default: 1024, or the model's limit."
    ),
]
Rounds = Annotated[int, typer.Option(help="Runs to measure, after one to warm up. Figures are medians.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the table to this file, as SVG.")]


def kernels(
    artifact: Kept,
    function: Function = DEFAULTS.function,
    rows: Rows = DEFAULTS.rows,
    context: Context = DEFAULTS.context,
    rounds: Rounds = DEFAULTS.rounds,
    device: DeviceName = LOAD.device,
    program: ProgramName = LOAD.program,
    precision: Precision = LOAD.precision,
    kv_bits: KvBits = LOAD.kv_bits,
    threads: Threads = LOAD.threads,
    trust: Trust = LOAD.trust,
    as_json: JsonFile = None,
    as_plot: PlotFile = None,
) -> None:
    """Time each kernel launch of a step on this machine: µs, bytes, GB/s and share; summed by kernel, too.

    In decode, the GB/s of a matrix should be near the memory's bandwidth. If they are much lower, the launch
    itself takes the time, or too few threads load at once. Bytes are the least that a launch must move: its
    weights, the cache at this context, the activations. `whole step` is the wall time of the same plan
    without timestamps; if the launches sum to much less, the host or gaps between launches take the rest.

    Needed: a CPU, a Vulkan queue with timestamps, or WebGPU with timestamp-query, where each launch becomes
    a pass. MLX has no launches.

    `nearfar bench kernels out/sample --rows 256 --device vulkan --plot prefill.svg`
    """
    for path in (as_json, as_plot):
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{path.parent} is not a folder", "json" if path is as_json else "plot")
    folder = kept(artifact)
    with waiting("compiling and timing kernels"):
        load = LoadOptions(
            device=device, threads=threads, precision=precision, program=program, kv_bits=kv_bits, trust=trust
        )
        made = profile(folder, load, ProfileOptions(function, rows, context, rounds))
    Console().print(view(made))
    if as_json is not None:
        as_json.write_text(json.dumps(made.record(), indent=1) + "\n", encoding="utf-8")
    if as_plot is not None:
        as_plot.write_text(plot(made), encoding="utf-8")
