"""Bounds on the figures of kernels and plans for each class of devices, in one table.

Bytes in flight hide the latency of memory: they should be twice the bandwidth times the latency (0.5 to 0.7
µs). The bounds of `software`, where processors emulate a GPU, are the figures that its kernels reach, so that
a regression is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nearfar.format.adapters import DeviceClass as Name
from nearfar.format.figures import Figures
from nearfar.kernels.jobs import Attend, Embed, Job, Linear, Project
from nearfar.targets.gpu.classes import DeviceClass
from nearfar.targets.gpu.kernels.append.project import HeadDivision
from nearfar.targets.gpu.kernels.linear.matvec import groups, takes

Kind = Literal["matvec", "project", "gathering", "matmul", "decode", "prefill", "other"]
"""gathering: a matvec whose rows are attention in parts."""
FEW_ROWS, MANY_ROWS = 4, 256
"""Up to FEW_ROWS rows, a matvec is wanted; from MANY_ROWS on, the bounds on the operations for a
byte apply.
"""
MEGABYTE = 1 << 20
SLACK = 1.01
"""A tolerance: a norm has a barrier of its own, and sums over workgroups are sampled, so they are not whole
numbers.
"""


SCALES = 1.2
"""Two tiles of a group may both read its scale, which takes a ninth of a q4 matrix in groups of 64."""
GATHERING, PARTS, PARTS_OPERATIONS = 2, 4, 2.4
"""The additional cost of a matvec over attention in parts: barriers, after the parts' weights and after the
rows; loads of parts for each load of the matrix, and products for each weight, with 16 parts.
"""
REUSE = 0.9
"""The share that a tile should reach of its largest possible number of products for a fetched byte."""


@dataclass(frozen=True)
class Bounds:
    """The least and the most that figures may be. A figure that is None for a kernel is not checked."""

    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def missed(self, figures: Figures) -> dict[str, str]:
        """The figures that are out of bounds, each with its value and its bound."""
        found = {}
        for name, bound in self.least.items():
            value = getattr(figures, name)
            if value is not None and value * SLACK < bound:
                found[name] = f"{value:.4g}, wanted ≥ {bound:.4g}"
        for name, bound in self.most.items():
            value = getattr(figures, name)
            if value is not None and value > bound * SLACK:
                found[name] = f"{value:.4g}, wanted ≤ {bound:.4g}"
        return found

    def __or__(self, other: Bounds) -> Bounds:
        """Both bounds; where both have one, that of `other` counts."""
        return Bounds({**self.least, **other.least}, {**self.most, **other.most})


EVERY = Bounds(most={"storage_buffers": 8, "threads_per_workgroup": 256, "largest_binding": 128 * MEGABYTE})
"""The limits that WebGPU guarantees. A binding is checked only if it is a matrix: see `wanted`."""
# Two tiles of 64 by 64 with their scales do not fit into 16 KB; a discrete GPU has 64 KB and more, of which
# two workgroups use 48.
WANTED: dict[Name, dict[Kind, Bounds]] = {
    "software": {
        "matvec": Bounds(
            {"bytes_in_flight": 2304, "threads": 72, "line_use": 0.25},
            {"loads_per_byte": 1 / 4, "x_loads": 2, "operations_per_weight": 5.2, "serial_steps": 360,
             "weight_reads": 1.1, "idle": 0.1, "barriers": 1, "shared_bytes": 16384},
        ),
        "matmul": Bounds({"flop_per_byte": 16}, {"weight_reads": 32, "barriers_per_k": 1 / 4}),
        "decode": Bounds({}, {"cache_reads": 1.01}),
        "prefill": Bounds({}, {"cache_reads": 1.01}),
        "other": Bounds(),
    },
    "mobile": {
        "matvec": Bounds(
            {"line_use": 0.95, "loads_ahead": 4},
            {"loads_per_byte": 1 / 16, "x_loads": 1, "operations_per_weight": 2.5, "serial_steps": 16,
             "weight_reads": 1.1, "idle": 0.1, "barriers": 1, "registers": 64, "shared_bytes": 8192},
        ),
        "matmul": Bounds(
            {"line_use": 0.95},
            {"weight_reads": 8 * SCALES, "barriers_per_k": 1 / 16, "registers": 64, "shared_bytes": 8192},
        ),
        "decode": Bounds({}, {"cache_reads": 1.01, "registers": 64, "shared_bytes": 8192}),
        "prefill": Bounds({}, {"cache_reads": 1.1 / 16, "registers": 64, "shared_bytes": 8192}),
        "other": Bounds(),
    },
    "integrated": {
        "matvec": Bounds(
            {"line_use": 0.95, "loads_ahead": 8},
            {"loads_per_byte": 1 / 16, "x_loads": 1, "operations_per_weight": 2.5, "serial_steps": 8,
             "weight_reads": 1.1, "idle": 0.1, "barriers": 1, "registers": 96, "shared_bytes": 16384},
        ),
        "matmul": Bounds(
            {"line_use": 0.95},
            {"weight_reads": 4 * SCALES, "barriers_per_k": 1 / 16, "registers": 96, "shared_bytes": 16384},
        ),
        "decode": Bounds({}, {"cache_reads": 1.01, "registers": 96, "shared_bytes": 16384}),
        "prefill": Bounds({}, {"cache_reads": 1.1 / 32, "registers": 96, "shared_bytes": 16384}),
        "other": Bounds(),
    },
    "discrete": {
        "matvec": Bounds(
            {"line_use": 0.95, "loads_ahead": 8},
            {"loads_per_byte": 1 / 16, "x_loads": 1, "operations_per_weight": 4, "serial_steps": 4,
             "weight_reads": 1.1, "idle": 0.1, "barriers": 1, "registers": 96, "shared_bytes": 16384},
        ),
        "matmul": Bounds(
            {"line_use": 0.95},
            {"weight_reads": 4 * SCALES, "barriers_per_k": 1 / 32, "registers": 96, "shared_bytes": 24576},
        ),
        "decode": Bounds({}, {"cache_reads": 1.01, "registers": 96, "shared_bytes": 16384}),
        "prefill": Bounds({}, {"cache_reads": 1.1 / 32, "registers": 96, "shared_bytes": 16384}),
        "other": Bounds(),
    },
}  # fmt: skip

LAUNCHES_A_LAYER = 6
PIPELINES = 60
"""The most kernels of a program."""
WRITTEN = 0.01
"""The most bytes that a token's launches may write, as a share of the weights' bytes."""


def kind_of(job: Job) -> Kind:
    """The kind of bounds that apply to a job's first launch."""
    if isinstance(job, Project):
        return "project"
    if isinstance(job, Linear):
        few: Kind = "matvec" if job.split is None else "gathering"
        return few if job.m <= FEW_ROWS else "matmul"
    if isinstance(job, Attend):
        return "decode" if job.m <= FEW_ROWS else "prefill"
    return "other"


def wanted(job: Job, device: DeviceClass, matrix: int = 0) -> Bounds:
    """The bounds of a job's first launch on a class of devices; `matrix`: bytes of the job's matrix."""
    kind = kind_of(job)
    if kind == "matmul" and isinstance(job, Linear) and takes(job, device):
        return EVERY | _grouped(job, device) | _filling(device, matrix)
    if kind == "gathering":
        bounds = _gathering(device)
    else:
        bounds = WANTED[device.name]["matvec" if kind == "project" else kind]
    if kind in ("matvec", "project", "gathering"):
        bounds = bounds | _filling(device, matrix)
    if kind == "matmul" and isinstance(job, Linear):
        bounds = bounds | _tiled(job, device, matrix)
    if isinstance(job, Project) and HeadDivision.of(job).normed:
        bounds = bounds | Bounds(most={"barriers": 2})  # sums along k, and squares of a head
    if isinstance(job, Linear | Project | Embed):
        return EVERY | bounds
    return Bounds(most={name: bound for name, bound in EVERY.most.items() if name[:7] != "largest"}) | bounds


def _gathering(device: DeviceClass) -> Bounds:
    """The bounds of a matvec, with the cost of gathering its rows."""
    matvec = WANTED[device.name]["matvec"]
    operations = matvec.most["operations_per_weight"] + PARTS_OPERATIONS
    beside = {"barriers": 1 + GATHERING, "x_loads": PARTS, "operations_per_weight": operations}
    return matvec | Bounds(most=beside)


def _grouped(job: Linear, device: DeviceClass) -> Bounds:
    """The bounds of a matvec that reads the matrix once for each group of rows: each row costs its own loads
    of x.
    """
    matvec, rows = WANTED[device.name]["matvec"], math.ceil(job.m / groups(job))
    most = {"weight_reads": matvec.most["weight_reads"] * groups(job), "x_loads": 2 * rows}
    return matvec | Bounds(most=most)


def _tiled(job: Linear, device: DeviceClass, matrix: int) -> Bounds:
    """Bounds for tiles of r rows by c columns: reads of a weight, and 2·r·c products for c weights and r
    inputs.
    """
    if job.m < MANY_ROWS:  # with a tile or two of rows, the figure says little about the use of a byte
        of_many = WANTED[device.name]["matmul"].most["weight_reads"] * job.m / MANY_ROWS
        return Bounds({"flop_per_byte": 0}, {"weight_reads": max(of_many, SCALES)})
    if not device.launched:
        return Bounds()
    rows, columns = device.tile
    weight, value = matrix / job.matrix.n / job.matrix.k, 4 if job.x_dtype == "float32" else 2
    return Bounds({"flop_per_byte": REUSE * 2 / (weight / rows + value / columns)})


def _filling(device: DeviceClass, matrix: int) -> Bounds:
    """Bytes in flight and threads that fill the device, as far as the matrix reaches."""
    least: dict[str, float] = {}
    if device.in_flight:
        least["bytes_in_flight"] = min(device.in_flight, matrix)
    if device.launched and matrix >= MEGABYTE:
        least["threads"] = device.launched
    return Bounds(least)
