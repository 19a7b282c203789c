"""Compiles TIR to WebAssembly modules: LLVM makes the kernels, and zig links them with the cpu target's C
runtime.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tvm

from nearfar.format.sizes import WASM_RESERVED
from nearfar.kernels.emission import Told
from nearfar.kernels.keep import Keep
from nearfar.targets.cpu.codegen import compile_objects
from nearfar.targets.cpu.link import compile_runtime, symbol, zig
from nearfar.targets.llvm.passes import TRUSTING
from nearfar.targets.wasm import UNIT

TRIPLE = "wasm32-unknown-unknown"
ZIG = "wasm32-freestanding"
STACK_BYTES = 1 << 20  # the stack of the first instance
MAX_BYTES = 65535 * 65536  # zig cannot read 2^32
_EXPORTS = (
    "__stack_pointer", "nf_kernels", "nf_error", "nf_replay",
    "nf_pool_new", "nf_pool_work", "nf_pool_fail", "nf_pool_free",
)  # fmt: skip
# Relaxed SIMD is left out, because LLVM would use it unasked, and not every engine has it. Engines with
# simd128 have atomics and bulk memory; over a memory that is not shared only waiting is an error, and one
# thread never waits.
_COMPILED = dataclasses.replace(UNIT, features=(*UNIT.features, "atomics", "bulk-memory"))
_MCPU = "-mcpu=generic+simd128+atomics+bulk_memory+mutable_globals"
_LINK = (
    "-target", ZIG, _MCPU, "-O3", "-Wl,--no-entry", "-Wl,-s", *(f"-Wl,--export={name}" for name in _EXPORTS),
    "-Wl,--import-memory", f"-Wl,--initial-memory={WASM_RESERVED}", f"-Wl,--max-memory={MAX_BYTES}",
    f"-Wl,-z,stack-size={STACK_BYTES}",
)  # fmt: skip


def link_modules(
    mod: tvm.IRModule, paths: Mapping[Path, bool], told: Told | None = None, keep: Keep | None = None
) -> None:
    """Compile `mod` and link it into each file of `paths`; a path's value says whether the file is for shared
    memory.

    `told`: called with the number of compiled kernels and of all kernels. `keep`: has object files of earlier
    builds.
    """
    # Relative names in a temporary directory keep this machine's paths out of the module.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = compile_objects(mod, _COMPILED, TRIPLE, folder, TRUSTING, told, keep)
        objects = [file.name for file in made.files]
        runtime = compile_runtime(ZIG, folder, ("wasm.c", "bare.c"), (_MCPU,))
        (folder / "kernels.c").write_text(_table(mod, made.shared), encoding="utf-8")
        zig(["cc", "-target", ZIG, _MCPU, "-c", "kernels.c", "-o", "kernels.o"], folder)
        for path, shared in paths.items():
            memory = ["-Wl,--shared-memory"] if shared else []
            zig(["cc", *_LINK, *memory, *objects, *runtime, "kernels.o", "-o", "model.wasm"], folder)
            shutil.move(folder / "model.wasm", path)


def _table(mod: tvm.IRModule, shared: Mapping[str, str]) -> str:
    """C source of nf_kernels: the kernels' functions in the order of the kernels' names, then 0."""
    names = sorted(str(name.name_hint) for name in mod.get_global_vars())
    functions = [symbol(shared.get(name, name)) for name in names]
    lines = [f"int {function}(void *, const void *, int, void *);" for function in sorted(set(functions))]
    table = "".join(f"  {function},\n" for function in functions)
    return "\n".join(
        [*lines, f"int (*const nf_kernels[])(void *, const void *, int, void *) = {{\n{table}  0\n}};\n"]
    )
