"""Runs TVM's build for the kernels of a GPU target: one device module for each, as TVM's code generator
writes it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from nearfar.errors import BuildError
from nearfar.processors import processors

from .tir_passes import EXPLICIT_SYNC, PIPELINE

# the class's type stub requires fields that the class computes itself
_Structure: Any = tvm_ffi.StructuralKey


def kernels(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    """The PrimFuncs of a module by name."""
    return {
        str(variable.name_hint): func
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


def device_sources(mod: tvm.IRModule, kind: str) -> dict[str, str]:
    """The source of every kernel of `mod` for a kind of target, by the kernel's name."""
    funcs = kernels(mod)
    with ThreadPoolExecutor(processors()) as pool:  # TVM's passes release the interpreter lock
        made = pool.map(lambda name: _source(name, _names(funcs[name]), _Structure(funcs[name]), kind), funcs)
        return dict(zip(funcs, made, strict=True))


def _names(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The names of a kernel's parameters, which its source has and its structure does not."""
    return tuple(str(param.name) for param in func.params)


@lru_cache(maxsize=1024)
def _source(name: str, names: tuple[str, ...], structure: Any, kind: str) -> str:
    """The source of a kernel, cached: programs share most kernels, and models many."""
    func = structure.key
    # The host's side is never run, and printing C is faster than compiling with LLVM.
    target = tvm.target.Target(kind, host="c")
    single = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    ours = func.attrs is not None and EXPLICIT_SYNC in func.attrs
    imports = tvm.tirx.build(single, target=target, pipeline=PIPELINE if ours else "s_tir").imports
    if len(imports) != 1:
        raise BuildError(f"kernel {name}: {len(imports)} device modules, expected 1")
    return str(imports[0].inspect_source())
