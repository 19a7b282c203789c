"""Figures of GPU kernels, as a build writes them beside a program and `nearfar inspect --kernels` reads them.

They say what a launch runs, loads, waits for and holds; they are computed from the kernels
(nearfar.targets.gpu.figures), so they need no GPU. No runtime reads them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar import strict_json
from nearfar.errors import ArtifactError

DIGITS = 6
"""After the point, of what is no whole number."""


@dataclass(frozen=True)
class Figures:
    """What one launch of a kernel does. None: the figure means nothing for this kernel.

    What a kernel is there to read is *streamed*: the parts of its matrix (parameters w0, w1, …); without one
    the cache's keys and values; without those all its inputs. A *stretch* is what a thread does between two
    waits, a wait being a barrier, or the beginning, the end or the next turn of a loop: within it a compiler
    can issue all loads before their first use.
    """

    workgroups: int
    threads_per_workgroup: int
    threads: int
    """Threads of the launch."""
    bytes_in_flight: int
    """Streamed bytes, of all threads of the launch together, that the stretch loads which loads most."""
    loads_ahead: int
    """Loads of these in that stretch, by one thread."""
    line_use: float
    """The share used of the 128-byte lines that 32 threads side by side touch in a load."""
    loads_per_byte: float
    """Loads for a streamed byte: 1/16 where each brings four words."""
    weight_reads: float | None
    """How often the launch fetches a byte of the matrix. What threads of a workgroup load together is fetched
    once.
    """
    cache_reads: float | None
    """How often the launch fetches a byte of the cache that lies before one of its rows, for each row."""
    x_loads: float | None
    """Loads of x for a load of the matrix."""
    bytes_written: int
    barriers: int
    barriers_per_k: float | None
    """Barriers for an input of the matrix."""
    serial_steps: int
    """Stretches with loads of what is streamed that a thread does one after another."""
    operations_per_weight: float | None
    """Arithmetic on data (not on addresses) for a weight and row; two float16 of a vector cost one."""
    flop_per_byte: float | None
    """A matrix's arithmetic (2·m·n·k) for each fetched byte of x and of the matrix."""
    idle: float
    """Share of the streamed bytes that could be loaded, did all threads as much as the busiest, and are not,
    or are what a neighbour loads too.
    """
    registers: int
    """Registers of 4 bytes, by liveness of a thread's variables (registers.py)."""
    shared_bytes: int
    storage_buffers: int
    largest_binding: int
    """Bytes of the largest parameter of a fixed size."""


def text(figures: Mapping[str, Figures]) -> str:
    """The file: a record for each kernel, by its name."""
    records = {
        kernel: {
            name: round(value, DIGITS) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(found).items()
        }
        for kernel, found in figures.items()
    }
    return json.dumps(records, indent=1) + "\n"


def parse(content: str, where: str) -> dict[str, Figures]:
    """Read the file; ArtifactError where it is not one."""
    names = {field.name for field in dataclasses.fields(Figures)}
    try:
        data: Any = strict_json.loads(content)
        found = {kernel: Figures(**record) for kernel, record in data.items()}
        wrong = [
            f"{kernel}.{name}"
            for kernel, record in data.items()
            for name in names
            if not isinstance(record[name], int | float | None) or isinstance(record[name], bool)
        ]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ArtifactError(
            f"{where} holds no figures of kernels ({error}). Build the artifact again"
        ) from error
    if wrong:
        raise ArtifactError(f"{where}: {wrong[0][:80]} is no number. Build the artifact again")
    return found
