"""TIR to a shared library: LLVM for the kernels, the system's C compiler for the thread pool and the link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen as llvm

from nearfar.edge_runtime.executors.cpu.features import KNOWN, architecture, cpu_flags
from nearfar.errors import BuildError
from nearfar.targets.cpu.tir_passes import PIPELINE
from nearfar.targets.cpu.units import BASELINE, BEST_FIRST, Unit

_PARTS = 8  # object files, and so the most threads that compile
_POOL = Path(__file__).with_name("pool.c")


def native() -> Unit:
    """The machine's own: every instruction of KNOWN that it has."""
    arch = architecture()
    if arch not in BASELINE:
        raise BuildError(f"the cpu target knows {', '.join(sorted(BASELINE))}; this machine is {arch}")
    mcpu = str(llvm.llvm_get_system_cpu())
    offered = llvm.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))
    promised = {str(name) for name in offered}
    # Virtual machines hide instructions that the CPU's model name promises.
    features = tuple(f for f in KNOWN[arch] if f in promised and (f in cpu_flags() or not cpu_flags()))
    like = next(unit for unit in BEST_FIRST[arch] if set(unit.features) <= set(features))
    return replace(like, name="native", mcpu=mcpu, features=features)


def llvm_target(unit: Unit, triple: str | None = None) -> tvm.target.Target:
    """LLVM's target for a unit, of this machine's system where no triple is given."""
    known = KNOWN.get(unit.architecture, unit.features)
    mattr = [f"{'+' if feature in unit.features else '-'}{feature}" for feature in known]
    config: dict[str, Any] = {"kind": "llvm", "mcpu": unit.mcpu, "mattr": mattr}
    return tvm.target.Target(config if triple is None else config | {"mtriple": triple})


def compile_library(mod: tvm.IRModule, path: Path | str, unit: Unit | None = None) -> None:
    """Compile `mod` and the pool into the shared library `path`; the same input gives the same bytes.

    `unit`: this machine's where none is given.
    """
    compiler = _compiler()
    # Relative names in a directory of our own: no path of this machine gets into the library.
    with tempfile.TemporaryDirectory() as folder:
        objects = [each.name for each in compile_objects(mod, unit or native(), None, Path(folder))]
        shutil.copy(_POOL, f"{folder}/pool.c")
        common = ["-O2", "-fPIC", "-pthread"]
        _run([compiler, "-std=c11", *common, "-c", "pool.c", "-o", "pool.o"], folder)
        _run(
            [compiler, "-shared", *common, *_link_options(), *objects, "pool.o", "-o", "model.so", "-lm"],
            folder,
        )
        shutil.move(f"{folder}/model.so", path)


def compile_objects(mod: tvm.IRModule, unit: Unit, triple: str | None, folder: Path) -> list[Path]:
    """Object files for LLVM's `triple` (None: this machine's), written into `folder`.

    They are made side by side (LLVM releases the interpreter lock), and always as many: the same bytes.
    """
    target = llvm_target(unit, triple)
    kernels = sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint))

    def compile_part(part: int) -> Path:
        path = folder / f"kernels{part}.o"
        module = tvm.IRModule({str(variable.name_hint): func for variable, func in kernels[part::_PARTS]})
        tvm.tirx.build(module, target=target, pipeline=PIPELINE).write_to_file(str(path))
        return path

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
