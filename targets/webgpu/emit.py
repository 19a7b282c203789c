"""Writes the webgpu target's shaders and plans."""

from __future__ import annotations

import math

from nearfar.format import manifest
from nearfar.format.manifest import Requires
from nearfar.kernels.emission import EmitContext, module_of
from nearfar.kernels.program import LoweredProgram
from nearfar.targets.gpu.emit import gpu_program, largest_buffer, shader_record
from nearfar.targets.webgpu.codegen import shaders


def emit(program: LoweredProgram, context: EmitContext) -> manifest.Program:
    """Write the shaders and plans; arguments are in the order of the shader's bindings. Returns the program's
    record.
    """
    half = program.dtypes.activations == "float16"
    made = shaders(module_of(program), "f16" if half else "f32")
    kernels = {
        name: shader_record(context, name, ".wgsl", made[name].source.encode(), made[name])
        for name in program.kernels
    }
    largest = largest_buffer(program, context)
    limits = {
        "maxStorageBuffersPerShaderStage": max(len(shader.access) for shader in made.values()),
        "maxStorageBufferBindingSize": largest,
        "maxBufferSize": largest,
        "maxComputeInvocationsPerWorkgroup": max(math.prod(shader.workgroup) for shader in made.values()),
        "maxComputeWorkgroupSizeX": max(shader.workgroup[0] for shader in made.values()),
        "maxComputeWorkgroupStorageSize": max(shader.shared_bytes for shader in made.values()),
    }
    features = ["shader-f16"] if half else []
    features += sorted({feature for shader in made.values() for feature in shader.language})
    return gpu_program(program, context, kernels, made, Requires(tuple(features), limits))
