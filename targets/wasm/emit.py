"""Writes the wasm target's modules and plans."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nearfar.format import manifest
from nearfar.format.manifest import Requires
from nearfar.kernels.emission import EmitContext, module_of, sha256_of
from nearfar.kernels.program import LoweredProgram
from nearfar.targets.cpu.emit import record
from nearfar.targets.wasm import UNIT
from nearfar.targets.wasm.codegen import link_modules


def emit(program: LoweredProgram, context: EmitContext) -> manifest.Program:
    """Write the modules and plans; returns the record of the program with one thread."""
    files = {library(program.name, shared): shared for shared in (True, False)}
    for file in files:
        (context.root / file).parent.mkdir(parents=True, exist_ok=True)
    link_modules(
        module_of(program),
        {context.root / file: shared for file, shared in files.items()},
        context.told,
        context.keep,
    )
    requires = Requires(UNIT.features, {}, UNIT.architecture)
    return record(program, context, requires, library(program.name, shared=False))


def with_threads(root: Path, program: manifest.Program) -> manifest.Program:
    """The record of the program for shared memory: it differs in module, name and features from the program
    with one thread.
    """
    file = library(program.name, shared=True)
    return dataclasses.replace(
        program,
        name=_threaded(program.name),
        requires=Requires((*program.requires.features, "atomics"), {}, UNIT.architecture),
        library=file,
        library_sha256=sha256_of(root / file),
    )


def library(name: str, shared: bool) -> str:
    """The path of a program's module, or of its version with threads (`shared`)."""
    return f"kernels/{_threaded(name) if shared else name}/model.wasm"


def _threaded(name: str) -> str:
    return f"{name}-threads"
