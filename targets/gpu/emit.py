"""Writes programs of shaders: their files, their plans with grids, and their requirements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nearfar.errors import BuildError
from nearfar.format import figures, manifest
from nearfar.format.consistency import DTYPE_BYTES
from nearfar.format.manifest import Kernel, Requires
from nearfar.kernels.emission import EmitContext, plan_file, write_plans
from nearfar.kernels.program import LoweredProgram
from nearfar.targets.gpu.figures import figures_of


def shader_record(
    context: EmitContext,
    name: str,
    suffix: str,
    code: bytes,
    made: Any,
    workgroup: Sequence[int] = (),
) -> Kernel:
    """Write a kernel's file, named by its content, so that programs with the same kernel share a file;
    returns its record.
    """
    digest = hashlib.sha256(code).hexdigest()
    file = f"kernels/{name}.{digest[:8]}{suffix}"
    path = context.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(code)
    return Kernel(file, made.entry, tuple(made.access), digest, workgroup=tuple(workgroup))


def gpu_program(
    program: LoweredProgram,
    context: EmitContext,
    kernels: dict[str, Kernel],
    made: Mapping[str, Any],
    requires: Requires,
) -> manifest.Program:
    """Write the plans of a program of shaders; returns the program's record in the manifest."""
    launches: dict[str, list[dict[str, Any]]] = {}
    for plan in program.plans:
        launches[plan_file(program, plan)] = [
            _launch(la.kernel, la.args, made[la.kernel]) for la in plan.launches
        ]
    return manifest.Program(
        name=program.name,
        activations=program.dtypes.activations,
        kv_dtype=program.dtypes.kv,
        requires=requires,
        workspace=tuple(program.workspace),
        kernels=kernels,
        functions=write_plans(context.root, program, launches),
        figures=_write_figures(program, context) if context.figures else None,
    )


def _write_figures(program: LoweredProgram, context: EmitContext) -> manifest.File:
    """Write the figures of the program's kernels, for `nearfar inspect --kernels`."""
    path = context.root / "figures" / f"{program.name}.json"
    path.parent.mkdir(exist_ok=True)
    found = {name: figures_of(kernel) for name, kernel in program.kernels.items()}
    path.write_text(figures.text(found))
    return manifest.File.of(context.root, path)


def _launch(kernel: str, args: Sequence[str], made: Any) -> dict[str, Any]:
    """The record of one launch; BuildError if it binds a buffer twice and writes it: WebGPU forbids that, and
    our SPIR-V declares that it does not happen.
    """
    bound = [args[i] for i in made.params]
    for arg, access in zip(bound, made.access, strict=True):
        if access == "read_write" and bound.count(arg) > 1:
            raise BuildError(f"kernel {kernel} writes {arg}, which is bound to it twice")
    return {"kernel": kernel, "grid": list(made.grid), "args": bound}


def largest_buffer(program: LoweredProgram, context: EmitContext) -> int:
    """Bytes of the largest buffer of a fixed size (the cache's size depends on its budget)."""
    sizes = [context.largest_weight, *program.workspace]
    for buffer in context.buffers.values():
        extents = [extent for extent in buffer.shape if isinstance(extent, int)]
        if len(extents) == len(buffer.shape):
            sizes.append(DTYPE_BYTES[buffer.dtype] * math.prod(extents))
    return max(sizes)
