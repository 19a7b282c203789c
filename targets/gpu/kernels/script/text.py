"""Turns kernels written as TVMScript into PrimFuncs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from nearfar.targets.gpu.kernels.script import statements
from nearfar.targets.gpu.kernels.script.parser import parsed


def prim_func(func: Callable[..., None]) -> tirx.PrimFunc:
    """The PrimFunc of a script, equal to that of `T.prim_func(check_well_formed=False)`, but made by our own
    parser.
    """
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return made(func, known(func, frame.f_back.f_locals))


def known(func: Callable[..., None], around: dict[str, Any]) -> dict[str, Any]:
    """The meanings of a script's names that it does not bind itself.

    `around`: the variables of the function around the script, since names that only occur in annotations are
    not in the closure.
    """
    annotated = {name: around[name] for name in parsed(func).annotated if name in around}
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    return {**func.__globals__, **annotated, **{name: cell.cell_contents for name, cell in cells}}


def made(func: Callable[..., None], names: dict[str, Any]) -> tirx.PrimFunc:
    """The PrimFunc of a script whose free names have these meanings."""
    script = parsed(func)
    names = dict(names)
    exec(script.code, names)
    write: Callable[[ModuleType], None] = names[script.name]
    with IRBuilder() as ir_builder, builder.prim_func():
        builder.func_name(script.name)
        write(statements)
    kernel: tirx.PrimFunc = ir_builder.get()
    return kernel


def local_array(name: str, count: int, dtype: str) -> Any:
    """Declare an array of a thread in the kernel that is being parsed."""
    return IRBuilder.name(name, T.alloc_local((count,), dtype))


def shared_array(name: str, count: int, dtype: str) -> Any:
    """Declare an array of a workgroup in the kernel that is being parsed."""
    return IRBuilder.name(name, T.alloc_shared((max(count, 1),), dtype))
