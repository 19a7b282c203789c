"""Figures of a kernel that need no GPU: what its launch runs, loads, waits for and holds.

They are computed from the kernel as the code generators get it, never from the constants that shaped it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from nearfar.format.sizes import MAX_STEP, PAGE_SIZE
from nearfar.targets.gpu.tir_passes import straightened

from .lanes import Array
from .reads import Reads
from .registers import registers
from .walk import Memory, Trace, Walk

CONTEXT = 1024
"""Positions that the last row sees, its own included, where nothing else is said."""
CACHES = ("k_cache", "v_cache")


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
    """Of the launch."""
    bytes_in_flight: int
    """Streamed bytes, of all threads of the launch together, that the stretch loads which loads most."""
    loads_ahead: int
    """Loads of these in that stretch, by one thread."""
    line_use: float
    """Of the 128-byte lines that 32 threads side by side touch in a load, the share that they use."""
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
    barriers: int
    barriers_per_k: float | None
    """Barriers for an input of the matrix."""
    serial_steps: int
    """Stretches with loads of what is streamed that a thread does one after another."""
    operations_per_weight: float | None
    """Arithmetic on data (not on addresses) for a weight and row; two float16 of a vector cost one."""
    flop_per_byte: float | None
    """Of a matrix's products (2·m·n·k), for a fetched byte of x and of the matrix."""
    idle: float
    """Share of the streamed bytes that could be loaded, did all threads as much as the busiest, and are not,
    or are what a neighbour loads too.
    """
    registers: int
    """Of 4 bytes, by liveness of a thread's variables (registers.py)."""
    shared_bytes: int
    storage_buffers: int
    largest_binding: int
    """Bytes of the largest parameter of a fixed size."""


def figures_of(func: tirx.PrimFunc, context: int = CONTEXT) -> Figures:
    """The figures of a kernel as `Kernels.stages` gives it, its last row at position context - 1."""
    with tvm.target.Target("webgpu", host="c"):
        lowered = straightened(tvm.IRModule({"kernel": func}))["kernel"]
    names = [str(param.name) for param in func.params]
    streamed = _streamed(names)
    trace = Walk(lowered, streamed, _host_writes(func, context)).run()
    return _figures(trace, streamed, context, registers(lowered))


def _streamed(names: list[str]) -> frozenset[str]:
    matrix = frozenset(name for name in names if name[0] == "w" and name[1:].isdigit())
    caches = frozenset(name for name in names if name in CACHES and "q" in names)
    return matrix or caches or frozenset(names)


def _host_writes(func: tirx.PrimFunc, context: int) -> Mapping[str, Array]:
    """Rows of one sequence, the last at context - 1; pages lie in order."""
    shapes = {str(param.name): [_extent(extent) for extent in param.ty.shape] for param in func.params}
    rows = shapes.get("q", shapes.get("x", [1]))[0]
    positions = np.minimum(np.arange(MAX_STEP) + max(context - rows, 0), max(context, rows) - 1)
    return {"positions": positions, "page_table": np.arange(shapes.get("page_table", [1, 1])[-1])}


def _extent(extent: Any) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm | int) else 0


def _figures(trace: Trace, streamed: frozenset[str], context: int, live: int) -> Figures:
    reads = [trace.reads[name] for name in sorted(streamed & trace.reads.keys())]
    loads, loaded, fetched, used, touched = (
        sum(getattr(read, name) for read in reads)
        for name in ("loads", "loaded", "fetched", "used", "touched")
    )
    x, y, z = trace.workgroup
    threads = x * y * z
    workgroups = trace.grid[0] * trace.grid[1] * trace.grid[2]
    product = _product(trace, streamed)
    k = product[2] if product else None
    of_x = trace.reads.get("x", Reads())
    bound = [memory for memory in trace.parameters.values() if memory.name in {*trace.reads, *trace.written}]
    possible = trace.loaded_by_one * threads * workgroups
    matrix = sum(trace.parameters[name].size for name in streamed)
    return Figures(
        workgroups=workgroups,
        threads_per_workgroup=threads,
        threads=threads * workgroups,
        bytes_in_flight=round(trace.in_flight),
        loads_ahead=round(trace.loads_ahead),
        line_use=used / touched if touched else 1.0,
        loads_per_byte=loads / loaded if loaded else 0.0,
        weight_reads=fetched / matrix if "w0" in streamed else None,
        cache_reads=_cache_reads(trace, fetched, context) if streamed <= set(CACHES) else None,
        x_loads=of_x.loads / loads if product and loads else None,
        barriers=round(trace.barriers),
        barriers_per_k=trace.barriers / k if k else None,
        serial_steps=round(trace.steps),
        operations_per_weight=trace.operations / float(np.prod(product)) if product else None,
        flop_per_byte=2 * float(np.prod(product)) / (fetched + of_x.fetched) if product else None,
        idle=1 - fetched / possible if possible else 0.0,
        registers=live,
        shared_bytes=trace.shared_bytes,
        storage_buffers=len(bound),
        largest_binding=max((memory.size for memory in bound), default=0),
    )


def _product(trace: Trace, streamed: frozenset[str]) -> tuple[int, int, int] | None:
    """M, n, k of a matrix's product with rows: x is [.., k], the matrix's first part [.., n]."""
    parameters = trace.parameters
    if "w0" not in streamed or "x" not in parameters:
        return None
    x, codes, out = parameters["x"], parameters["w0"], parameters["out"]
    rows = min(x.shape[0], out.shape[0])
    return rows, codes.shape[-1] * codes.kind.lanes, x.shape[-1] * x.kind.lanes


def _cache_reads(trace: Trace, fetched: float, context: int) -> float:
    """Of causal rows, the last at context - 1."""
    cache, rows = trace.parameters["k_cache"], trace.parameters["q"].shape[0]
    position = 2 * int(np.prod(cache.shape[1:])) * cache.kind.size / PAGE_SIZE
    seen = sum(max(context, rows) - row for row in range(rows))
    return fetched / (position * seen)
