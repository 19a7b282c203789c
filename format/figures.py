"""Figures of GPU kernels: a build writes them beside a program, and `nearfar inspect --kernels` reads them.

They say how much a launch runs, loads, waits and holds; nearfar.targets.gpu.figures computes them from the
kernels, without a GPU. No runtime reads them.
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
"""Digits after the decimal point of figures that are not integers."""


@dataclass(frozen=True)
class Figures:
    """The figures of one launch of a kernel. None: the figure means nothing for this kernel.

    The data that a kernel mainly reads is *streamed*: the parts of its matrix (parameters w0, w1, …); for a
    kernel without a matrix the cache's keys and values; otherwise all inputs. A *stretch* is a thread's work
    between two waits: a wait is a barrier, or the beginning, the end or the next turn of a loop. Within a
    stretch a compiler can issue all loads before their first use.
    """

    workgroups: int
    threads_per_workgroup: int
    threads: int
    """Threads of the launch."""
    bytes_in_flight: int
    """Streamed bytes that all threads of the launch load in the stretch with the most loads."""
    loads_ahead: int
    """Streamed loads of one thread in that stretch."""
    line_use: float
    """The used share of the 128-byte lines that 32 neighbouring threads touch in a load."""
    loads_per_byte: float
    """Loads for each streamed byte: 1/16 if each load brings four words."""
    weight_reads: float | None
    """How often the launch fetches a byte of the matrix. Bytes that threads of a workgroup load together are
    fetched once.
    """
    cache_reads: float | None
    """How often the launch fetches a byte of the cache for each row; only positions before one of the
    launch's rows count.
    """
    x_loads: float | None
    """Loads of x for each load of the matrix."""
    bytes_written: int
    barriers: int
    barriers_per_k: float | None
    """Barriers for each input of the matrix."""
    serial_steps: int
    """Stretches with streamed loads that a thread runs one after another."""
    operations_per_weight: float | None
    """Arithmetic operations on data (not on addresses) for each weight and row; two float16 of a vector count
    as one.
    """
    flop_per_byte: float | None
    """The matrix's arithmetic (2·m·n·k) for each fetched byte of x and of the matrix."""
    idle: float
    """The wasted share of the streamed bytes that could be loaded if all threads loaded as much as the
    busiest: bytes that are not loaded, or that a neighbour loads too.
    """
    registers: int
    """Registers of 4 bytes, estimated from the liveness of a thread's variables (registers.py)."""
    shared_bytes: int
    storage_buffers: int
    largest_binding: int
    """Bytes of the largest parameter with a fixed size."""


def text(figures: Mapping[str, Figures]) -> str:
    """The text of a figures file: a record for each kernel, by its name."""
    records = {
        kernel: {
            name: round(value, DIGITS) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(found).items()
        }
        for kernel, found in figures.items()
    }
    return json.dumps(records, indent=1) + "\n"


def parse(content: str, where: str) -> dict[str, Figures]:
    """Read the text of a figures file; ArtifactError if it is not one. `where` names the file in messages."""
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
        raise ArtifactError(f"{where}: {wrong[0][:80]} is not a number. Build the artifact again")
    return found
