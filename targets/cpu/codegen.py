"""TIR to a shared library: LLVM for the kernels, the system's C compiler for the thread pool and the link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen as llvm

from nearfar.build.source import CpuFeatures
from nearfar.edge_runtime.executors.cpu.features import KNOWN, architecture, cpu_flags
from nearfar.errors import BuildError
from nearfar.targets.cpu.tir_passes import PIPELINE

_PARTS = 8  # object files, and so the most threads that compile
_POOL = Path(__file__).with_name("pool.c")
_BASELINE = {"x86_64": "x86-64-v3", "aarch64": "generic"}


@dataclass(frozen=True)
class Required:
    """What a library needs of the CPU that runs it: the manifest's requires.features."""

    architecture: str
    mcpu: str
    flags: tuple[str, ...]


def target(features: CpuFeatures) -> tuple[tvm.target.Target, Required]:
    """The LLVM target, and what its code requires."""
    arch = architecture()
    if arch not in _BASELINE:
        raise BuildError(f"the cpu target knows {', '.join(sorted(_BASELINE))}; this machine is {arch}")
    mcpu = _BASELINE[arch] if features == "baseline" else str(llvm.llvm_get_system_cpu())
    config: dict[str, Any] = {"kind": "llvm", "mcpu": mcpu}
    flags = _known_flags(config)
    if features == "native" and cpu_flags():
        # Virtual machines hide instructions that the CPU's model name promises.
        absent = [flag for flag in flags if flag not in cpu_flags()]
        if absent:
            config["mattr"] = [f"-{flag}" for flag in absent]
            flags = tuple(flag for flag in flags if flag not in absent)
    return tvm.target.Target(config), Required(arch, mcpu, flags)


def _known_flags(config: dict[str, Any]) -> tuple[str, ...]:
    offered = {str(name) for name in llvm.llvm_get_cpu_features(tvm.target.Target(config))}
    return tuple(flag for flag in KNOWN[architecture()] if flag in offered)


def compile_library(mod: tvm.IRModule, path: Path | str, features: CpuFeatures = "native") -> Required:
    """Compile `mod` and the pool into the shared library `path`; the same input gives the same bytes."""
    llvm_target, needed = target(features)
    compiler = _compiler()
    # Relative names in a directory of our own: no path of this machine gets into the library.
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(mod, llvm_target, folder)
        shutil.copy(_POOL, f"{folder}/pool.c")
        common = ["-O2", "-fPIC", "-pthread"]
        _run([compiler, "-std=c11", *common, "-c", "pool.c", "-o", "pool.o"], folder)
        _run(
            [compiler, "-shared", *common, *_link_options(), *objects, "pool.o", "-o", "model.so", "-lm"],
            folder,
        )
        shutil.move(f"{folder}/model.so", path)
    return needed


def compile_objects(mod: tvm.IRModule, llvm_target: tvm.target.Target, folder: str) -> list[str]:
    """Object files, made side by side (LLVM releases the interpreter lock); always as many: same bytes."""
    kernels = sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint))

    def compile_part(part: int) -> str:
        name = f"kernels{part}.o"
        module = tvm.IRModule({str(variable.name_hint): func for variable, func in kernels[part::_PARTS]})
        tvm.tirx.build(module, target=llvm_target, pipeline=PIPELINE).write_to_file(f"{folder}/{name}")
        return name

    parts = range(min(_PARTS, len(kernels)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_part, parts))


def _link_options() -> list[str]:
    if sys.platform == "darwin":
        return ["-undefined", "dynamic_lookup"]
    return ["-s", "-Wl,-Bsymbolic", "-Wl,--build-id=none"]


def _compiler() -> str:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise BuildError(
        "building for cpu needs a C compiler (none of cc, gcc, clang found): install one, "
        "e.g. apt-get install gcc"
    )


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{Path(command[0]).name} failed with status {done.returncode}:\n{done.stderr.strip()}"
        )
