"""Compiles one kernel to an object file, or takes the object file that an earlier build has kept."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tvm
import tvm_ffi
from tvm import tirx

from nearfar.kernels.keep import Keep
from nearfar.targets.llvm import passes

PIPELINES = (passes.PIPELINE, passes.TRUSTING)


def object_of(func: tirx.PrimFunc, target: tvm.target.Target, pipeline: str, keep: Keep | None) -> bytes:
    """The object file of a kernel, which exports the function's global symbol.

    `pipeline`: one of PIPELINES. `keep`: gives a kept object file of the same TIR, target and passes.
    """
    if keep is None:
        return compile_object(func, target, pipeline)
    # The text has every number of the kernel in full, and is the same in every process.
    told = func.script(show_meta=True), str(tvm_ffi.structural_hash(func))
    return keep(lambda: compile_object(func, target, pipeline), compile_object, str(target), pipeline, *told)


def compile_object(func: tirx.PrimFunc, target: tvm.target.Target, pipeline: str) -> bytes:
    """Compile a kernel: its passes, then LLVM."""
    module = tvm.IRModule({str(func.attrs["global_symbol"]): func})
    with tempfile.TemporaryDirectory(prefix="nearfar-kernel-") as folder:
        path = Path(folder) / "kernel.o"
        tvm.tirx.build(module, target=target, pipeline=pipeline).write_to_file(str(path))
        return path.read_bytes()
