"""TVM's build of the kernels of a GPU target: one device module each, as its code generator wrote it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from nearfar.errors import BuildError

from .tir_passes import EXPLICIT_SYNC, PIPELINE

Sources = dict[tuple[str, str, object], str]
"""Sources of kernels by kind of target, name and structure: programs have most of them in common."""
_Structure: Any = tvm_ffi.StructuralKey  # whose stub asks for fields that it computes


def kernels(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    """The PrimFuncs of a module by name."""
    return {
        str(variable.name_hint): func
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


def device_sources(mod: tvm.IRModule, kind: str, known: Sources | None = None) -> dict[str, str]:
    """The source of every kernel of `mod` for a kind of target, by the kernel's name.

    What `known` has is not made again, and what is made is added to it.
    """
    # Nobody runs the host's side, and C is printed sooner than LLVM compiles.
    target = tvm.target.Target(kind, host="c")
    funcs = kernels(mod)

    def compile_one(name: str) -> str:
        func = funcs[name]
        single = tvm.IRModule({name: func.with_attr("global_symbol", name)})
        ours = func.attrs is not None and EXPLICIT_SYNC in func.attrs
        imports = tvm.tirx.build(single, target=target, pipeline=PIPELINE if ours else "s_tir").imports
        if len(imports) != 1:
            raise BuildError(f"kernel {name}: {len(imports)} device modules, expected 1")
        return str(imports[0].inspect_source())

    known = {} if known is None else known
    keys = {name: (kind, name, _Structure(func)) for name, func in funcs.items()}
    new = [name for name in funcs if keys[name] not in known]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # TVM's passes release the interpreter lock
        known.update(zip((keys[name] for name in new), pool.map(compile_one, new), strict=True))
    return {name: known[keys[name]] for name in funcs}
