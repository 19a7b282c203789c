"""Writes the vulkan target's modules and plans."""

from __future__ import annotations

import math

from nearfar.format import manifest
from nearfar.format.manifest import Requires
from nearfar.kernels.emission import EmitContext, module_of
from nearfar.kernels.program import LoweredProgram
from nearfar.targets.gpu.emit import gpu_program, largest_buffer, shader_record
from nearfar.targets.vulkan.codegen import modules


def emit(program: LoweredProgram, context: EmitContext) -> manifest.Program:
    """Write the modules and plans; arguments are in the order of the descriptor set's bindings. Returns the
    program's record.
    """
    made = modules(module_of(program))
    kernels = {
        name: shader_record(context, name, ".spv", made[name].code, made[name], made[name].workgroup)
        for name in program.kernels
    }
    limits = {
        "maxPerStageDescriptorStorageBuffers": max(len(module.access) for module in made.values()),
        "maxStorageBufferRange": largest_buffer(program, context),
        "maxComputeWorkGroupInvocations": max(math.prod(module.workgroup) for module in made.values()),
        "maxComputeSharedMemorySize": max(module.shared_bytes for module in made.values()),
    }
    for axis, letter in enumerate("XYZ"):
        limits[f"maxComputeWorkGroupSize{letter}"] = max(module.workgroup[axis] for module in made.values())
    subgroup = max(module.subgroup_size for module in made.values())
    if subgroup:
        limits["subgroupSize"] = subgroup
    features = sorted({feature for module in made.values() for feature in module.features})
    return gpu_program(program, context, kernels, made, Requires(tuple(features), limits))
