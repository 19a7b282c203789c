"""TIR to a shared library: LLVM for the kernels; link.py adds the thread pool."""

from __future__ import annotations

import os
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
from nearfar.targets.cpu.link import link
from nearfar.targets.cpu.platforms import host
from nearfar.targets.cpu.tir_passes import PIPELINE

_PARTS = 8  # object files, and so the most threads that compile
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
    with tempfile.TemporaryDirectory() as folder:
        objects = _compile(mod, llvm_target, folder)
        link([Path(folder, name) for name in objects], host(), Path(path))
    return needed


def _compile(mod: tvm.IRModule, llvm_target: tvm.target.Target, folder: str) -> list[str]:
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
