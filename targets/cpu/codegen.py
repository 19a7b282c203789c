"""Compiles TIR to a shared library: LLVM makes the kernels, link.py adds the thread pool."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.target import codegen as llvm

from nearfar.errors import BuildError
from nearfar.format.machines import KNOWN, architecture
from nearfar.format.processor import offered
from nearfar.kernels.keep import Keep
from nearfar.processors import processors
from nearfar.targets.cpu.link import link
from nearfar.targets.cpu.platforms import Platform, host
from nearfar.targets.cpu.units import BASELINE, Unit, nearest
from nearfar.targets.llvm.objects import object_of
from nearfar.targets.llvm.passes import PIPELINE

# the class's type stub requires fields that the class computes itself
_Structure: Any = tvm_ffi.StructuralKey


def native() -> Unit:
    """The vector unit of this machine, with every instruction of KNOWN that it has; BuildError on other
    architectures.
    """
    arch = architecture()
    if arch not in BASELINE:
        raise BuildError(f"the cpu target knows {', '.join(sorted(BASELINE))}; this machine is {arch}")
    mcpu = str(llvm.llvm_get_system_cpu())
    known = llvm.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": mcpu}))
    promised = {str(name) for name in known}
    # Virtual machines hide instructions that the CPU's model name promises, and a program must not require
    # instructions that the runtime will not find.
    features = tuple(feature for feature in KNOWN[arch] if feature in promised and feature in offered())
    return replace(nearest(arch, features), name="native", mcpu=mcpu, features=features)


def llvm_target(unit: Unit, triple: str | None = None) -> tvm.target.Target:
    """LLVM's target for a unit; without `triple`, for this machine's operating system."""
    known = KNOWN.get(unit.architecture, unit.features)
    mattr = [f"{'+' if feature in unit.features else '-'}{feature}" for feature in known]
    config: dict[str, Any] = {"kind": "llvm", "mcpu": unit.mcpu, "mattr": mattr}
    if unit.architecture == "wasm32":
        config["vector-width"] = 32 * unit.lanes  # TVM would choose the same width, with a warning
    return tvm.target.Target(config if triple is None else config | {"mtriple": triple})


def compile_library(
    mod: tvm.IRModule,
    path: Path | str,
    unit: Unit | None = None,
    platform: Platform | None = None,
    told: Callable[[int, int], None] | None = None,
    keep: Keep | None = None,
) -> None:
    """Compile `mod` and the runtime into the shared library `path`; the same input gives the same bytes.

    `unit`, `platform`: default to this machine's. `told`: called with the number of compiled kernels and of
    all kernels. `keep`: has object files of earlier builds.
    """
    where = platform or host()
    with tempfile.TemporaryDirectory(prefix="nearfar-kernels-") as folder:
        made = compile_objects(mod, unit or native(), where.triple, Path(folder), told=told, keep=keep)
        link(made.files, where, Path(path), made.shared)


@dataclass(frozen=True)
class Objects:
    """Kernels as object files. `shared`: for each kernel that equals another, the name under which the files
    contain it.
    """

    files: list[Path]
    shared: dict[str, str]


def compile_objects(
    mod: tvm.IRModule,
    unit: Unit,
    triple: str | None,
    folder: Path,
    pipeline: str = PIPELINE,
    told: Callable[[int, int], None] | None = None,
    keep: Keep | None = None,
) -> Objects:
    """Compile functions to object files for LLVM's `triple` (None: this machine's), one for each, written
    into `folder`.

    They are compiled in parallel: LLVM releases the interpreter lock.
    """
    first: dict[Any, str] = {}
    shared: dict[str, str] = {}
    for name, func in sorted(
        ((str(variable.name_hint), func) for variable, func in mod.functions_items()), key=itemgetter(0)
    ):
        held = first.setdefault(_Structure(func.without_attr("global_symbol")), name)
        if held != name:
            shared[name] = held

    def compile_one(item: tuple[int, tuple[Any, str]]) -> Path:
        index, (structure, name) = item
        path = folder / f"kernels{index}.o"
        path.write_bytes(_object(_Kernel(name, structure, unit, triple, pipeline, keep)))
        return path

    total = len(first) + len(shared)
    with ThreadPoolExecutor(processors()) as pool:
        files = []
        for count, file in enumerate(pool.map(compile_one, enumerate(first.items())), 1 + len(shared)):
            files.append(file)
            if told is not None:
                told(count, total)
    return Objects(files, shared)


@dataclass(frozen=True)
class _Kernel:
    """What an object file is made of, and the cache that may have it, which makes no difference to it."""

    name: str
    structure: Any
    unit: Unit
    triple: str | None
    pipeline: str
    keep: Keep | None = field(compare=False)


@lru_cache(maxsize=512)
def _object(kernel: _Kernel) -> bytes:
    """The object file of a kernel, cached: models share many kernels, above all the sampler's."""
    func = kernel.structure.key.with_attr("global_symbol", kernel.name)
    return object_of(func, llvm_target(kernel.unit, kernel.triple), kernel.pipeline, kernel.keep)
