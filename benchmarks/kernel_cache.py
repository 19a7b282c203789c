"""Building the sample model with no compiled kernels kept, and with all: seconds of the whole command, of
processors, and by phase as it says them.

Each build is a process of its own; the kept kernels lie in a folder of the benchmark's, never the user's.

    python benchmarks/kernel_cache.py [--checkpoint DIR] [--target cpu,webgpu] [--repeat 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

SAMPLE = Path(__file__).parents[1] / "examples" / "sample-model"


@dataclass(frozen=True)
class Measure:
    """One kind of build: medians over the runs. `processors`: seconds of CPU time, which other work on the
    machine changes less. `kernels`: the command's line about kernels in the last run.
    """

    build: str
    seconds: float
    processors: float
    phases: dict[str, float]
    kernels: str


def run(command: list[str], kernels: Path) -> Measure:
    """Run one build with the kernel cache in a given folder."""
    before, start = _processors(), time.monotonic()
    environment = {**os.environ, "NEARFAR_KERNEL_CACHE": str(kernels)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    said = dict(line.split(": ", 1) for line in done.stderr.splitlines() if ": " in line)
    phases = {name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+) s", said["time"])}
    phases = {"start": seconds - sum(phases.values()), **phases}
    return Measure("", seconds, _processors() - before, phases, said["kernels"].rpartition(", ")[0])


def _processors() -> float:
    """Seconds of processors that ended processes have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def median(build: str, runs: list[Measure]) -> Measure:
    """Medians over the runs; phases too short to be told count as 0."""
    names = dict.fromkeys(name for each in runs for name in each.phases)
    return Measure(
        build,
        statistics.median(each.seconds for each in runs),
        statistics.median(each.processors for each in runs),
        {name: statistics.median(each.phases.get(name, 0.0) for each in runs) for name in names},
        runs[-1].kernels,
    )


def main() -> None:
    """Build cold and warm in turn, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=SAMPLE)
    parser.add_argument("--target", default="cpu,webgpu")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[Measure]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="nearfar-bench-") as name:
        kernels, out = Path(name) / "kernels", Path(name) / "out"
        command = [sys.executable, "-m", "nearfar", "build", str(args.checkpoint), "--target", args.target]
        for _ in range(args.repeat):
            shutil.rmtree(kernels, ignore_errors=True)
            for build in runs:
                runs[build].append(run([*command, "-o", str(out)], kernels))
    rows = [median(build, found) for build, found in runs.items()]
    columns = ("build", "seconds", "of processors", *rows[0].phases, "kernels")
    table = Table(*columns, title=f"{args.checkpoint.name}, {args.target}")
    for row in rows:
        phases = (row.phases.get(name, 0.0) for name in rows[0].phases)
        figures = (f"{value:.1f}" for value in (row.seconds, row.processors, *phases))
        table.add_row(row.build, *figures, row.kernels)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
