"""The wasm target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nearfar.build.source import BuildOptions, Source
from nearfar.format.manifest import Weights
from nearfar.targets.cpu import packing
from nearfar.targets.planned import PlannedTarget
from nearfar.targets.target import Made, Programs
from nearfar.targets.wasm import variants
from nearfar.targets.wasm.emit import emit, with_threads


class WasmTarget(PlannedTarget):
    """A program is there twice: over shared memory, with threads, and over a memory of its own."""

    def finish(
        self, source: Source, root: Path, weights: Weights, programs: Programs, options: BuildOptions
    ) -> Made:
        """See Target.finish. The programs with threads come first: they are taken where they can run."""
        made = super().finish(source, root, weights, programs, options)
        threaded = tuple(with_threads(root, program) for program in made.programs)
        return dataclasses.replace(made, programs=threaded + made.programs)


TARGET = WasmTarget("wasm", packing, variants, {"kind": "llvm"}, emit, packed=True)
