"""The parts that attention and the append before it share: their arguments, and views of the cache."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from nearfar.errors import BuildError
from nearfar.format.kv import rows_of
from nearfar.kernels.jobs import Attend, RopeAppend
from nearfar.targets.cpu.kernels import vec as v
from nearfar.targets.cpu.kernels.half import by_hand
from nearfar.targets.cpu.kernels.pages import places
from nearfar.targets.cpu.kernels.quantized_kv import PageLayout
from nearfar.targets.cpu.units import Unit

Expr = Any
Args = list[tuple[str, tuple[Any, ...], str]]


def check(job: RopeAppend | Attend) -> None:
    """BuildError for shapes and dtypes without a kernel."""
    if job.head_dim % 2:
        raise BuildError(f"the cpu target needs an even head_dim, this model has {job.head_dim}")
    if job.page_size % v.LANES:
        raise BuildError(
            f"the cpu target needs a page_size that is a multiple of {v.LANES}, not {job.page_size}"
        )
    if job.dtype != "float32":
        raise BuildError(f"the cpu target has float32 activations only, not {job.dtype}")


def arguments(job: RopeAppend | Attend) -> tuple[Args, Expr]:
    """Name, shape and dtype of each input of the job and of `out`; and the number of pages, a symbol.

    In a page of keys the positions are innermost, in a page of values the components are: a vector load gives
    one component of 8 keys, and scores need no horizontal sums. The runtime copies whole pages; only its
    snapshots look inside (docs/artifact.md, `kv.L.k`).
    """
    pages, context = tirx.Var("pages", "int32"), tirx.Var("context", "int32")
    dtype, cache = rows_of((pages, job.kv_heads, job.page_size, job.head_dim), job.kv_dtype)
    known: dict[str, tuple[tuple[Any, ...], str]] = {
        "q": (job.q_shape, job.dtype), "k_cache": (cache, dtype), "v_cache": (cache, dtype),
        "rope": ((context, job.head_dim), "float32"), "sinks": ((job.heads,), "float32"), "out": job.out,
        **places(job),
    }  # fmt: skip
    if isinstance(job, RopeAppend):
        of_all = (job.heads, job.kv_heads) if job.norm_all else (1, 1)
        known["x"] = ((job.m, job.x_heads * job.head_dim), job.dtype)
        known["k_rounding"] = ((2 * job.kv_heads * job.head_dim,), "float32")
        known |= {
            f"{part}_norm": ((n * job.head_dim,), "float32") for part, n in zip("qk", of_all, strict=True)
        }
    return [(name, *known[name]) for name in (*job.inputs(), "out")], pages


def caches(job: RopeAppend | Attend, unit: Unit, buf: dict[str, Expr], pages: Expr) -> dict[str, Expr]:
    """Views of the caches: `values` [pages, kv_heads, page_size, head_dim]; `keys` with positions innermost,
    [pages, kv_heads, head_dim, page_size].

    For quantized caches each view is a pair: PageLayout.views.
    """
    if layout := PageLayout.of(job, unit):
        return {
            name: layout.views(buf[cache].data, pages, job.kv_heads)
            for name, cache in (("keys", "k_cache"), ("values", "v_cache"))
        }
    dtype = "uint16" if by_hand(unit, job.kv_dtype) else job.kv_dtype
    keys = (pages, job.kv_heads, job.head_dim, job.page_size)
    values = (pages, job.kv_heads, job.page_size, job.head_dim)
    return {
        name: T.decl_buffer(shape, dtype, data=buf[cache].data)
        for name, shape, cache in (("keys", keys, "k_cache"), ("values", values, "v_cache"))
    }
