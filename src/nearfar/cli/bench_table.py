"""Shows what launches cost, in a terminal or as SVG drawn by rich."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich import box
from rich.bar import Bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nearfar.edge_runtime.artifact.budget import show_size
from nearfar.edge_runtime.profiling.measure import KernelCost, LaunchCost, Profile

BAR = 12
"""Characters of the longest bar in a terminal: kernels have long names, lines 80 characters."""
PLOT, PLOT_BAR = 180, 80
"""Characters in a line of the plot, and of its longest bar."""

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
"""Colours of kernels, the kernel that takes longest first."""


def view(made: Profile, bar: int = BAR) -> Group:
    """A table of each launch in order, one of the kernels, and one of the sums."""
    tokens = f"{made.context:,} tokens in the cache"
    what = f"{made.function}, {made.rows} row{'s' * (made.rows != 1)}, {tokens}, program {made.variant}"
    title = f"{made.model} on {made.device}: {what}; {made.rounds} rounds"
    most = max((launch.share for launch in made.launches), default=0)
    colours = {kernel.kernel: COLOURS[rank % len(COLOURS)] for rank, kernel in enumerate(made.kernels)}
    launches = _table("#", "groups", bar)
    for number, launch in enumerate(made.launches):
        groups = "" if launch.workgroups is None else f"{launch.workgroups:,}"
        cells = _cells(launch, most, colours[launch.kernel])
        launches.add_row(str(number), launch.kernel, groups, *cells)
    kernels = _table("", "launches", bar)
    most = max((kernel.share for kernel in made.kernels), default=0)
    for kernel in made.kernels:
        cells = _cells(kernel, most, colours[kernel.kernel])
        kernels.add_row("", kernel.kernel, str(kernel.launches), *cells)
    return Group(Text(title, style="bold"), launches, kernels, *_totals(made))


def _table(number: str, count: str, bar: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(number, justify="right")
    table.add_column("kernel", overflow="fold")
    for name in (count, "µs", "bytes", "GB/s", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", min_width=bar, max_width=bar)
    return table


def _cells(cost: LaunchCost | KernelCost, most: float, colour: str) -> Sequence[str | Bar]:
    """The cells of a row: figures, and a bar of the share, of full length for a share of `most`."""
    rate = f"{cost.gb_per_s:.2f}" if cost.microseconds else "–"
    figures = f"{cost.microseconds:,.1f}", show_size(cost.bytes), rate, f"{cost.share:.1%}"
    return *figures, Bar(most, 0, cost.share, color=colour)


def _totals(made: Profile) -> Sequence[Text]:
    total = made.microseconds
    rate = f", {made.bytes / total / 1e3:.2f} GB/s" if total else ""
    sums = f"{len(made.launches)} launches: {total:,.1f} µs, {show_size(made.bytes)}{rate}"
    step = made.step_microseconds
    wall = f"{step:,.1f} µs of wall time, at best {made.fastest_step_microseconds:,.1f}"
    lines = [Text(f"{sums}; whole step: {wall} ({total / step:.0%} in launches)")]
    if not total:
        lines.append(Text("the clock of this device is too coarse for a single launch", style="yellow"))
    return lines


def plot(made: Profile) -> str:
    """The view as SVG that loads nothing from the network: rich's own SVG loads a font."""
    console = Console(record=True, file=io.StringIO(), width=PLOT, force_terminal=True)
    console.print(view(made, PLOT_BAR))
    drawn = console.export_svg(title=f"nearfar bench kernels: {made.model} on {made.device}")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
