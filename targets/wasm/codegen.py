"""TIR to WebAssembly modules: LLVM for the kernels, zig (PyPI's ziglang) for the runtime and the link."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from nearfar.errors import BuildError
from nearfar.format.sizes import WASM_RESERVED
from nearfar.targets.cpu.codegen import compile_objects

LLVM: dict[str, Any] = {
    "kind": "llvm",
    "mtriple": "wasm32-unknown-unknown",
    "mattr": ["+simd128", "+atomics", "+bulk-memory"],
}
"""Without relaxed SIMD: LLVM would use it unasked, and not every engine has it."""
FEATURES = ("simd128",)
"""What a module requires of its engine, by LLVM's names; bulk memory came before simd128 everywhere."""
STACK_BYTES = 1 << 20  # of the first instance
MAX_BYTES = 65535 * 65536  # 2^32 is more than zig can read
_RUNTIME = Path(__file__).with_name("runtime.c")
_MCPU = "-mcpu=generic+simd128+atomics+bulk_memory+mutable_globals"
_COMPILE = ("-target", "wasm32-freestanding", _MCPU, "-std=c11", "-O2", "-ffreestanding", "-c")
_LINK = (
    "-target", "wasm32-freestanding", _MCPU, "-O3",
    "-Wl,--no-entry", "-Wl,-s", "-Wl,--export=__stack_pointer", "-Wl,--export=nf_kernels",
    "-Wl,--import-memory", f"-Wl,--initial-memory={WASM_RESERVED}",
    f"-Wl,--max-memory={MAX_BYTES}", f"-Wl,-z,stack-size={STACK_BYTES}",
)  # fmt: skip


def link_modules(mod: tvm.IRModule, paths: Mapping[Path, bool]) -> None:
    """Compile `mod`, and link it to each file of `paths`: whether it is for shared memory."""
    # Relative names in a directory of our own: no path of this machine gets into a module.
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(mod, tvm.target.Target(LLVM), folder)
        shutil.copy(_RUNTIME, f"{folder}/runtime.c")
        Path(folder, "kernels.c").write_text(_table(mod), encoding="utf-8")
        for name in ("runtime", "kernels"):
            _zig("cc", *_COMPILE, f"{name}.c", "-o", f"{name}.o", folder=folder)
        for path, shared in paths.items():
            memory = ["-Wl,--shared-memory"] if shared else []
            _zig("cc", *_LINK, *memory, *objects, "runtime.o", "kernels.o", "-o", "model.wasm", folder=folder)
            shutil.move(f"{folder}/model.wasm", path)


def _table(mod: tvm.IRModule) -> str:
    """nf_kernels: the functions in the order of their names, then 0."""
    names = sorted(f"__tvm_ffi_{name.name_hint}" for name in mod.get_global_vars())
    lines = [f"int {name}(void *, const void *, int, void *);" for name in names]
    table = "".join(f"  {name},\n" for name in names)
    return "\n".join(
        [*lines, f"int (*const nf_kernels[])(void *, const void *, int, void *) = {{\n{table}  0\n}};\n"]
    )


def _zig(*command: str, folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ziglang", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"zig failed with status {done.returncode}:\n{done.stderr.strip()}")
