"""Code generation: a program's kernels as files of the artifact, and its entry in the manifest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm

from nearfar.build.program.compile import Program
from nearfar.build.program.plan import Plan
from nearfar.errors import BuildError

CpuFeatures = Literal["native", "baseline"]


@dataclass(frozen=True)
class EmitContext:
    """Where to write, and what the plans' arguments look like."""

    root: Path
    buffers: Mapping[str, Mapping[str, Any]]  # by name, as in the manifest
    weights: Mapping[str, Mapping[str, Any]]  # tensor records by name
    cpu_features: CpuFeatures


def module_of(program: Program) -> tvm.IRModule:
    """The kernels as one module of public functions."""
    return tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in program.kernels.items()})


def write_plans(
    root: Path, program: Program, launches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Write each plan with its launches; the manifest's `functions`."""
    functions: dict[str, list[dict[str, Any]]] = {}
    for plan in program.plans:
        file = plan_file(program, plan)
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"function": plan.function, "size": plan.size, "rows": plan.rows, "launches": launches[file]}
        path.write_text(json.dumps(record, indent=1) + "\n")
        entry = {"size": plan.size, "rows": plan.rows, "plan": file, "sha256": sha256_of(path)}
        functions.setdefault(plan.function, []).append(entry)
    return functions


def plan_file(program: Program, plan: Plan) -> str:
    """Path of a plan in the artifact."""
    return f"plans/{program.precision}/{plan.function}.{plan.size}.json"


def sha256_of(path: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def emit_cpu(program: Program, context: EmitContext) -> dict[str, Any]:
    """The CPU's shared library and plans."""
    from nearfar.targets.cpu.codegen import compile_library

    library = f"kernels/{program.precision}/model.so"
    (context.root / library).parent.mkdir(parents=True, exist_ok=True)
    required = compile_library(module_of(program), context.root / library, context.cpu_features)
    launches = {
        plan_file(program, plan): [{"kernel": la.kernel, "args": list(la.args)} for la in plan.launches]
        for plan in program.plans
    }
    return {
        "precision": program.precision,
        "kv_dtype": "float16" if program.precision == "f16" else "float32",
        "requires": {"features": list(required.flags), "limits": {}, "arch": required.architecture},
        "workspace": program.workspace,
        "library": library,
        "library_sha256": sha256_of(context.root / library),
        "kernels": {
            name: {"params": _cpu_params(func, context, program, name)} for name, func in program.kernels.items()
        },
        "functions": write_plans(context.root, program, launches),
    }


def _cpu_params(func: Any, context: EmitContext, program: Program, kernel: str) -> list[dict[str, Any]]:
    """Dtype and shape of each parameter; symbolic extents take the name that the buffer has in the manifest."""
    launch = next(la for plan in program.plans for la in plan.launches if la.kernel == kernel)
    out: list[dict[str, Any]] = []
    for param, arg in zip(func.params, launch.args, strict=True):
        shape = [int(d) if isinstance(d, int) or hasattr(d, "value") else None for d in param.shape]
        if None in shape:
            shape = list(context.buffers[arg.split(":", 1)[1]]["shape"])
        out.append({"dtype": str(param.dtype), "shape": shape})
    return out


def emit_webgpu(program: Program, context: EmitContext) -> dict[str, Any]:
    """WGSL shaders and plans; arguments in the order of the shader's bindings."""
    from nearfar.targets.webgpu.codegen import shaders

    made = shaders(module_of(program), program.precision)
    kernels = {
        name: _shader_record(context, program, name, ".wgsl", made[name].source.encode(), made[name])
        for name in program.kernels
    }
    largest = _largest_buffer(program, context)
    limits = {
        "maxStorageBuffersPerShaderStage": max(len(shader.access) for shader in made.values()),
        "maxStorageBufferBindingSize": largest,
        "maxBufferSize": largest,
        "maxComputeInvocationsPerWorkgroup": max(math.prod(shader.workgroup) for shader in made.values()),
        "maxComputeWorkgroupSizeX": max(shader.workgroup[0] for shader in made.values()),
        "maxComputeWorkgroupStorageSize": max(shader.shared_bytes for shader in made.values()),
    }
    features = ["shader-f16"] if program.precision == "f16" else []
    return _gpu_program(program, context, kernels, made, {"features": features, "limits": limits})


def emit_vulkan(program: Program, context: EmitContext) -> dict[str, Any]:
    """SPIR-V modules and plans; arguments in the order of the descriptor set's bindings."""
    from nearfar.targets.vulkan.codegen import modules

    made = modules(module_of(program))
    kernels = {
        name: {
            **_shader_record(context, program, name, ".spv", made[name].code, made[name]),
            "workgroup": list(made[name].workgroup),
        }
        for name in program.kernels
    }
    limits = {
        "maxPerStageDescriptorStorageBuffers": max(len(module.access) for module in made.values()),
        "maxStorageBufferRange": _largest_buffer(program, context),
        "maxComputeWorkGroupInvocations": max(math.prod(module.workgroup) for module in made.values()),
        "maxComputeSharedMemorySize": max(module.shared_bytes for module in made.values()),
    }
    for axis, letter in enumerate("XYZ"):
        limits[f"maxComputeWorkGroupSize{letter}"] = max(module.workgroup[axis] for module in made.values())
    subgroup = max(module.subgroup_size for module in made.values())
    if subgroup:
        limits["subgroupSize"] = subgroup
    features = sorted({feature for module in made.values() for feature in module.features})
    return _gpu_program(program, context, kernels, made, {"features": features, "limits": limits})


def _shader_record(
    context: EmitContext, program: Program, name: str, suffix: str, code: bytes, made: Any
) -> dict[str, Any]:
    """Write a kernel's file; its record in the manifest."""
    file = f"kernels/{program.precision}/{name}{suffix}"
    path = context.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(code)
    return {"file": file, "entry": made.entry, "access": list(made.access), "sha256": sha256_of(path)}


def _gpu_program(
    program: Program, context: EmitContext, kernels: dict[str, Any], made: Mapping[str, Any], requires: dict[str, Any]
) -> dict[str, Any]:
    """The manifest's entry of a program of shaders; writes its plans."""
    launches: dict[str, list[dict[str, Any]]] = {}
    for plan in program.plans:
        launches[plan_file(program, plan)] = [_launch(la.kernel, la.args, made[la.kernel]) for la in plan.launches]
    return {
        "precision": program.precision,
        "kv_dtype": "float16" if program.precision == "f16" else "float32",
        "requires": requires,
        "workspace": program.workspace,
        "library": None,
        "kernels": kernels,
        "functions": write_plans(context.root, program, launches),
    }


def _launch(kernel: str, args: Sequence[str], made: Any) -> dict[str, Any]:
    """One launch. Shaders take it that no buffer that they write is bound twice: WebGPU demands it, our SPIR-V declares it."""
    bound = [args[i] for i in made.params]
    for arg, access in zip(bound, made.access, strict=True):
        if access == "read_write" and bound.count(arg) > 1:
            raise BuildError(f"kernel {kernel} writes {arg}, which is bound to it twice")
    return {"kernel": kernel, "grid": list(made.grid), "args": bound}


def _largest_buffer(program: Program, context: EmitContext) -> int:
    """Bytes of the largest buffer of fixed size (the cache's own need depends on its budget)."""
    sizes = [record["bytes"] for record in context.weights.values()] + program.workspace
    sizes += [
        4 * math.prod(buffer["shape"])
        for buffer in context.buffers.values()
        if all(isinstance(extent, int) for extent in buffer["shape"])
    ]
    return int(max(sizes))
