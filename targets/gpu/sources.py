"""TVM's build of the kernels of a GPU target: one device module each, as its code generator wrote it."""

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

_Structure: Any = tvm_ffi.StructuralKey  # whose stub asks for fields that it computes


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
        made = pool.map(lambda name: _source(name, _Structure(funcs[name]), kind), funcs)
        return dict(zip(funcs, made, strict=True))


@lru_cache(maxsize=1024)
def _source(name: str, structure: Any, kind: str) -> str:
    """The source of a kernel: programs have most of them in common, and models many."""
    func = structure.key
    # Nobody runs the host's side, and C is printed sooner than LLVM compiles.
    target = tvm.target.Target(kind, host="c")
    single = tvm.IRModule({name: func.with_attr("global_symbol", name)})
    ours = func.attrs is not None and EXPLICIT_SYNC in func.attrs
    imports = tvm.tirx.build(single, target=target, pipeline=PIPELINE if ours else "s_tir").imports
    if len(imports) != 1:
        raise BuildError(f"kernel {name}: {len(imports)} device modules, expected 1")
    return str(imports[0].inspect_source())
