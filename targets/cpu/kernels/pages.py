"""Launches over pages of a cache: the arguments that say where rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nearfar.format.sizes import MAX_STEP
from nearfar.kernels.contract import Stage, Staged
from nearfar.kernels.jobs import Attend, Conv, Delta, RopeAppend, Ssm
from nearfar.targets.cpu.kernels import vec as v

Expr = Any


def places(job: RopeAppend | Attend | Conv | Delta | Ssm) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Shape and dtype of the arguments that tell the position and the sequence of a row, and its pages."""
    return {
        "positions": ((MAX_STEP,), "int32"),
        "slots": ((MAX_STEP,), "int32"),
        "page_table": ((job.slots, job.pages_per_slot), "int32"),
    }


def launch(
    name: str,
    job: Conv | Delta | Ssm,
    floats: Mapping[str, tuple[Any, ...]],
    body: Callable[[dict[str, Expr]], None],
) -> Staged:
    """One launch of a job that keeps something else than keys and values. `floats`: the shapes of its float32
    arguments; `body` gets all arguments by name.
    """
    known = {arg: (shape, "float32") for arg, shape in floats.items()} | places(job) | {"out": job.out}
    names = (*job.inputs(), "out")

    def named(*buffers: Expr) -> None:
        body(dict(zip(names, buffers, strict=True)))

    return Staged((Stage(v.prim_func(name, [(arg, *known[arg]) for arg in names], named), names),))
