"""How a kernel that is written as TVMScript becomes a PrimFunc."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from tvm import script, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder


def prim_func(func: Callable[..., None]) -> tirx.PrimFunc:
    """What `T.prim_func(check_well_formed=False)` makes.

    That decorator looks at the source of every caller, twice a kernel: most of the time that a kernel took,
    the more the deeper the calls and the more modules there are. This one looks at the caller's variables:
    what only annotations name is not in the closure.
    """
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    around = frame.f_back.f_locals
    annotated = {name: around[name] for name in _named_by_annotations(func) if name in around}
    known = {**func.__globals__, **annotated, **inspect.getclosurevars(func).nonlocals}
    made: tirx.PrimFunc = script.from_source(func, known, check_well_formed=False)
    return made


prim_func.dispatch_token = "tirx"  # type: ignore[attr-defined]  # how the parser knows its decorators


def _named_by_annotations(func: Callable[..., Any]) -> set[str]:
    """Annotations are text here: files with kernels import annotations from __future__."""
    trees = [ast.parse(text, mode="eval") for text in func.__annotations__.values()]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def local_array(name: str, count: int, dtype: str) -> Any:
    """Declare an array of a thread in the kernel that is being parsed."""
    return IRBuilder.name(name, T.alloc_local((count,), dtype))


def shared_array(name: str, count: int, dtype: str) -> Any:
    """Declare an array of a workgroup in the kernel that is being parsed."""
    return IRBuilder.name(name, T.alloc_shared((max(count, 1),), dtype))
