"""Figures of a kernel that need no GPU: what its launch runs, loads, waits for and holds.

They are computed from the kernel as the code generators get it, never from the constants that shaped it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm_ffi import structural_hash

from nearfar.format.figures import Figures
from nearfar.format.sizes import MAX_STEP, PAGE_SIZE
from nearfar.kernels.jobs import Split
from nearfar.targets.gpu.tir_passes import straightened

from .lanes import Array
from .reads import Reads
from .registers import registers
from .trace import Trace
from .walk import Walk

CONTEXT = 1024
"""Positions that the last row sees by default, its own included."""
CACHES = ("k_cache", "v_cache")
INPUTS = ("x", "partial")
"""Names of the rows that a matrix multiplies: rows as they are, or attention in parts."""

BYTES = 4  # bytes of a word

_known: dict[tuple[object, ...], Figures] = {}
"""Figures computed so far: programs of one build share many kernels."""


def figures_of(func: tirx.PrimFunc, context: int = CONTEXT) -> Figures:
    """The figures of a kernel from `Kernels.stages`, with its last row at position context - 1."""
    names = tuple(str(param.name) for param in func.params)
    key = structural_hash(func), names, context
    if key not in _known:
        with tvm.target.Target("webgpu", host="c"):
            lowered = straightened(func)
        streamed = _streamed(names)
        trace = Walk(lowered, streamed, _host_writes(func, context)).run()
        _known[key] = _figures(trace, streamed, context, registers(lowered))
    return _known[key]


def _streamed(names: tuple[str, ...]) -> frozenset[str]:
    matrix = frozenset(name for name in names if name[0] == "w" and name[1:].isdigit())
    caches = frozenset(name for name in names if name in CACHES and "q" in names)
    return matrix or caches or frozenset(names)


def _host_writes(func: tirx.PrimFunc, context: int) -> Mapping[str, Array]:
    """Contents of the host's buffers for rows of one sequence, the last at position context - 1, with pages
    in order.
    """
    shapes = {str(param.name): [_extent(extent) for extent in param.ty.shape] for param in func.params}
    rows = next((shapes[name][0] for name in ("q", *INPUTS) if name in shapes), 1)
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
    of_x = next((trace.reads[name] for name in INPUTS if name in trace.reads), Reads())
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
        bytes_written=round(sum(trace.written.values())),
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
    """The sizes m, n, k of a product; None for other kernels.

    x is [.., k], bytes of whole tiles of k in words, or parts [m, heads, .., k / heads + TAIL]; the matrix's
    first part is [.., n].
    """
    parameters = trace.parameters
    x = next((parameters[name] for name in INPUTS if name in parameters), None)
    if "w0" not in streamed or x is None:
        return None
    codes, out = parameters["w0"], parameters["out"]
    k = x.shape[-1] * x.kind.lanes * (BYTES if x.kind.name == "uint" else 1)
    if x.name == "partial":
        k = x.shape[1] * (k - Split.TAIL)
    return min(x.shape[0], out.shape[0]), codes.shape[-1] * codes.kind.lanes, k


def _cache_reads(trace: Trace, fetched: float, context: int) -> float:
    """How often the launch reads each cache position that causal rows, the last one at context - 1, see."""
    cache, rows = trace.parameters["k_cache"], trace.parameters["q"].shape[0]
    position = 2 * int(np.prod(cache.shape[1:])) * cache.kind.size / PAGE_SIZE
    seen = sum(max(context, rows) - row for row in range(rows))
    return fetched / (position * seen)


__all__ = ["CONTEXT", "Figures", "figures_of"]
