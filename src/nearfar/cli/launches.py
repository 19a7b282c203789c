"""`nearfar inspect --kernels`: every launch of an artifact's plans, with the figures of its kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nearfar.edge_runtime.artifact.reader import Artifact
from nearfar.errors import ArtifactError, RequestError
from nearfar.format import figures
from nearfar.format.figures import Figures
from nearfar.format.manifest import Function, Program
from nearfar.format.plans import Launch

SHADERS = ("webgpu", "vulkan")
HEADINGS = (
    "times", "groups", "threads", "bytes in\nflight", "weight\nreads", "line\nuse", "serial\nsteps",
    "bar-\nriers", "regis-\nters", "shared\nbytes",
)  # fmt: skip


def has_plans(artifact: Artifact) -> bool:
    """Whether the artifact's programs consist of launches of kernels that the build compiled."""
    return any(bucket.plan is not None for _, _, bucket in _buckets(artifact, None))


def why_no_launches(artifact: Artifact) -> str:
    """The message for an artifact without plans."""
    return (
        f"{artifact.target} has no launches to show, because its framework makes them at run time: "
        f"--kernels is for {', '.join((*SHADERS, 'cpu'))}"
    )


def launches(artifact: Artifact, chosen: str | None) -> dict[str, Any]:
    """The launches of each plan in order, and the figures of each kernel once; of one program, or of all.

    A launch of the cpu target calls a function of a library: it has neither workgroups nor figures.
    """
    if not has_plans(artifact):
        raise ArtifactError(f"{artifact.path}: {why_no_launches(artifact)}")
    found = {program.name: _figures(artifact, program) for program in artifact.manifest.programs}
    if chosen is not None and chosen not in found:
        raise RequestError(f"the artifact has the programs {', '.join(found)}, not {chosen!r}", "program")
    records = [
        {"function": name, "size": bucket.size, "rows": bucket.rows, **_launch(launch, program, found)}
        for program, name, bucket in _buckets(artifact, chosen)
        for launch in artifact.plan(bucket).launches
    ]
    return {
        "path": str(artifact.path),
        "target": artifact.target,
        "launches": records,
        "figures": {
            program: {kernel: asdict(of_kernel) for kernel, of_kernel in kernels.items()}
            for program, kernels in found.items()
            if chosen in (None, program)
        },
    }


def _buckets(artifact: Artifact, chosen: str | None) -> Iterator[tuple[Program, str, Function]]:
    for program in artifact.manifest.programs:
        if chosen in (None, program.name):
            for name, buckets in program.functions.items():
                yield from ((program, name, bucket) for bucket in buckets)


def _figures(artifact: Artifact, program: Program) -> dict[str, Figures]:
    """The figures of each kernel; empty where the program was built without them. Raises ArtifactError where
    one kernel lacks them.
    """
    if program.figures is None:
        return {}
    found = figures.parse(artifact.text(program.figures.file), program.figures.file)
    if missing := program.kernels.keys() - found.keys():
        raise ArtifactError(
            f"{program.figures.file} has no figures of {min(missing)}. Build the artifact again"
        )
    return found


def _launch(launch: Launch, program: Program, found: Mapping[str, Mapping[str, Figures]]) -> dict[str, Any]:
    """A launch's kernel and grid, with its most important figures; the other figures are listed with the
    kernel.
    """
    kernel = found[program.name].get(launch.kernel)
    workgroups = math.prod(launch.grid) if launch.grid else None
    return {
        "kernel": launch.kernel,
        "variant": program.name,
        "workgroups": workgroups,
        "threads": workgroups * kernel.threads_per_workgroup if workgroups and kernel else None,
        "bytes_in_flight": kernel.bytes_in_flight if kernel else None,
        "weight_reads": kernel.weight_reads if kernel else None,
    }


def show_launches(console: Console, report: dict[str, Any]) -> None:
    """Print a table for each bucket, in which launches of the same kernel are one line."""
    if report["target"] not in SHADERS:
        console.print(f"{report['target']}: launches are calls of a library; figures are of GPU kernels")
    elif not all(report["figures"].values()):
        console.print(
            "This artifact was built without figures of its kernels: `nearfar build --kernel-figures` "
            "computes them."
        )
    tables: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for launch in report["launches"]:
        tables.setdefault((launch["variant"], launch["function"], launch["size"]), []).append(launch)
    for (variant, function, size), of_bucket in tables.items():
        title = f"{variant}: {function} of {size}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
        table.add_column("kernel", overflow="fold")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        times = Counter(launch["kernel"] for launch in of_bucket)
        for launch in {launch["kernel"]: launch for launch in of_bucket}.values():
            of_kernel = report["figures"][variant].get(launch["kernel"], {})
            table.add_row(*_row(launch, times[launch["kernel"]], of_kernel))
        console.print(table)


def _row(launch: dict[str, Any], times: int, of_kernel: dict[str, Any]) -> Iterator[str]:
    yield launch["kernel"]
    yield str(times)
    for value in (launch["workgroups"], launch["threads"], launch["bytes_in_flight"]):
        yield "" if value is None else f"{value:,}"
    yield "" if launch["weight_reads"] is None else f"{launch['weight_reads']:.4g}"
    yield f"{of_kernel['line_use']:.0%}" if of_kernel else ""
    for name in ("serial_steps", "barriers", "registers", "shared_bytes"):
        yield f"{of_kernel[name]:,}" if of_kernel else ""
