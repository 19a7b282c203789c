"""Figures of the GPU kernels for published shapes, class by class, as Markdown: no GPU is needed, or used.

They are computed from the kernels that a build would make (nearfar.targets.gpu.figures); q4 in groups of 64,
the f16 program. A line is the worst of a kind: of a token's matrices, of 256 rows', of attention for either.
In brackets stands what the class wants of it, where it has a wish.

    python benchmarks/gpu_figures.py [--shape NAME …] [--class NAME …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nearfar.targets.gpu.classes import CLASSES, DeviceClass

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.published_kernels import Measured, compiled
from tests.support.wanted_kernels import Kind, kind_of, wanted

SHAPES = ("smollm2-135m", "llama-3.2-1b", "qwen3-4b")


@dataclass(frozen=True)
class Line:
    """A figure of a kind of kernels; `worst`: chooses the kernel that is shown."""

    kind: Kind
    figure: str
    words: str
    worst: Callable[[Sequence[float]], float]
    shown: Literal["count", "bytes", "ratio"] = "ratio"


LINES = (
    Line("matvec", "bytes_in_flight", "bytes in flight", min, "bytes"),
    Line("matvec", "threads", "threads", min, "count"),
    Line("matvec", "line_use", "used of touched 128-byte lines", min),
    Line("matvec", "loads_per_byte", "loads a byte", max),
    Line("matvec", "loads_ahead", "loads ahead of their use", min, "count"),
    Line("matvec", "x_loads", "loads of x for a load of weights", max),
    Line("matvec", "operations_per_weight", "operations a weight", max),
    Line("matvec", "serial_steps", "serial steps", max, "count"),
    Line("matvec", "barriers", "barriers", max, "count"),
    Line("matvec", "registers", "registers", max, "count"),
    Line("project", "bytes_in_flight", "bytes in flight", min, "bytes"),
    Line("project", "threads", "threads", min, "count"),
    Line("project", "serial_steps", "serial steps", max, "count"),
    Line("project", "barriers", "barriers", max, "count"),
    Line("matmul", "weight_reads", "reads of a weight", max),
    Line("matmul", "flop_per_byte", "FLOP a byte", min),
    Line("matmul", "barriers_per_k", "barriers an input", max),
    Line("matmul", "registers", "registers", max, "count"),
    Line("matmul", "shared_bytes", "workgroup memory", max, "bytes"),
    Line("decode", "bytes_in_flight", "bytes in flight", min, "bytes"),
    Line("decode", "threads", "threads", min, "count"),
    Line("decode", "serial_steps", "serial steps", max, "count"),
    Line("prefill", "cache_reads", "reads of the cache a row", max),
    Line("prefill", "registers", "registers", max, "count"),
)
TITLES: dict[Kind, str] = {
    "matvec": "matrices, 1 row", "project": "to q, k and v, 1 row",
    "matmul": "matrices, 256 rows", "decode": "attention, 1 row", "prefill": "attention, 256 rows",
}  # fmt: skip


def table(shape: str, classes: Sequence[DeviceClass]) -> str:
    """The Markdown table of a shape."""
    made = {device.name: compiled(shape, device) for device in classes}
    rows = [["kernels", "figure", *made], ["---", "---", *["---:"] * len(made)]]
    for line in LINES:
        cells = (_cell(line, device, made[device.name].measured) for device in classes)
        rows.append([TITLES[line.kind], line.words, *cells])
    launches = (f"{each.launches_a_layer:g}" for each in made.values())
    rows.append(["a token", "launches a layer", *launches])
    rows.append(
        ["a token", "written, of the weights' bytes", *(f"{m.written_share:.2%}" for m in made.values())]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(line: Line, device: DeviceClass, measured: Sequence[Measured]) -> str:
    """The worst value of a kind and the class's limit for that kernel; bold where it is missed, – without a
    kernel.
    """
    of_kind = [
        each
        for each in measured
        if kind_of(each.job) == line.kind and (line.kind != "matmul" or each.job.m == 256)
    ]
    if not of_kind:
        return "–"
    worst = line.worst([getattr(each.figures, line.figure) for each in of_kind])
    each = next(each for each in of_kind if getattr(each.figures, line.figure) == worst)
    bounds = wanted(each.job, device, each.matrix)
    bound = {**bounds.least, **bounds.most}.get(line.figure)
    sign = "≥" if line.figure in bounds.least else "≤"
    text = _shown(line, worst)
    if any(line.figure in wanted(e.job, device, e.matrix).missed(e.figures) for e in of_kind):
        text = f"**{text}**"
    return text if bound is None else f"{text} ({sign} {_shown(line, bound)})"


def _shown(line: Line, value: float) -> str:
    if line.shown == "bytes":
        return f"{value / 1024:,.3g} KB" if value < 1 << 20 else f"{value / (1 << 20):.3g} MB"
    return f"{value:,.0f}" if line.shown == "count" else f"{value:.3g}"


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=SHAPES, help="default: all three")
    parser.add_argument(
        "--class", dest="classes", action="append", choices=list(CLASSES), help="default: all"
    )
    arguments = parser.parse_args()
    for shape in arguments.shape or SHAPES:
        print(f"### {shape}\n")
        print(table(shape, [CLASSES[name] for name in arguments.classes or CLASSES]), end="\n\n")


if __name__ == "__main__":
    main()
