"""Writes the CPU target's shared library and plans."""

from __future__ import annotations

from typing import Any

from nearfar.format import manifest
from nearfar.format.manifest import KernelParam, Requires
from nearfar.kernels.emission import EmitContext, module_of, plan_file, sha256_of, write_plans
from nearfar.kernels.program import LoweredProgram
from nearfar.targets.cpu.codegen import compile_library
from nearfar.targets.cpu.kernels.extents import closed
from nearfar.targets.cpu.variants import CpuVariant


def emit(program: LoweredProgram, context: EmitContext) -> manifest.Program:
    """Write the library and the plans; return the program's record in the manifest."""
    assert isinstance(program.variant, CpuVariant)
    unit, platform = program.variant.unit, program.variant.platform
    library = f"kernels/{program.name}/{platform.library}"
    (context.root / library).parent.mkdir(parents=True, exist_ok=True)
    made = module_of(program)
    compile_library(made, context.root / library, unit, platform, context.told, context.keep)
    requires = Requires(unit.features, {}, platform.architecture, platform.system)
    return record(program, context, requires, library)


def record(
    program: LoweredProgram, context: EmitContext, requires: Requires, library: str
) -> manifest.Program:
    """Write the plans; return the record of a program whose library is already written."""
    launches = {
        plan_file(program, plan): [{"kernel": la.kernel, "args": list(la.args)} for la in plan.launches]
        for plan in program.plans
    }
    return manifest.Program(
        name=program.name,
        activations=program.dtypes.activations,
        kv_dtype=program.dtypes.kv,
        requires=requires,
        workspace=tuple(program.workspace),
        kernels={
            name: manifest.Kernel(params=_params(func, context, program, name))
            for name, func in program.kernels.items()
        },
        functions=write_plans(context.root, program, launches),
        library=library,
        library_sha256=sha256_of(context.root / library),
    )


def _params(func: Any, context: EmitContext, program: LoweredProgram, kernel: str) -> tuple[KernelParam, ...]:
    """Dtype and shape of each parameter of a kernel.

    The rows are those of the plan that launches the kernel; other symbolic extents get the name that the
    buffer has in the manifest.
    """
    plan, launch = next((plan, la) for plan in program.plans for la in plan.launches if la.kernel == kernel)
    out: list[KernelParam] = []
    for param, arg in zip(func.params, launch.args, strict=True):
        shape = closed(param.shape, plan.size)
        known = (
            context.buffers[arg.split(":", 1)[1]].shape
            if None in shape
            else tuple(d for d in shape if d is not None)
        )
        out.append(KernelParam(str(param.dtype), known))
    return tuple(out)
