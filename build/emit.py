"""Code generation: a program's kernels as files of the artifact, and its entry in the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tvm

from nearfar.build.plan import Plan
from nearfar.build.program import Program

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
    kernels: dict[str, Any] = {}
    for name in program.kernels:
        file = f"kernels/{program.precision}/{name}.wgsl"
        path = context.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[name].source)
        kernels[name] = {
            "file": file, "entry": made[name].entry, "access": list(made[name].access), "sha256": sha256_of(path)
        }  # fmt: skip
    launches: dict[str, list[dict[str, Any]]] = {}
    for plan in program.plans:
        launches[plan_file(program, plan)] = [
            {
                "kernel": la.kernel,
                "grid": list(made[la.kernel].grid),
                "args": [la.args[i] for i in made[la.kernel].params],
            }
            for la in plan.launches
        ]
    return {
        "precision": program.precision,
        "kv_dtype": "float16" if program.precision == "f16" else "float32",
        "requires": {
            "features": ["shader-f16"] if program.precision == "f16" else [],
            "limits": _limits(program, context, made),
        },
        "workspace": program.workspace,
        "library": None,
        "kernels": kernels,
        "functions": write_plans(context.root, program, launches),
    }


def _limits(program: Program, context: EmitContext, made: Mapping[str, Any]) -> dict[str, int]:
    """WebGPU limits that the kernels and the fixed buffers need (the cache's own need depends on its budget)."""
    sizes = [record["bytes"] for record in context.weights.values()] + program.workspace
    for buffer in context.buffers.values():
        if all(isinstance(d, int) for d in buffer["shape"]):
            count = 4
            for extent in buffer["shape"]:
                count *= extent
            sizes.append(count)
    return {
        "maxStorageBuffersPerShaderStage": max(len(shader.access) for shader in made.values()),
        "maxStorageBufferBindingSize": max(sizes),
        "maxBufferSize": max(sizes),
        "maxComputeInvocationsPerWorkgroup": max(_volume(shader.workgroup) for shader in made.values()),
        "maxComputeWorkgroupSizeX": max(shader.workgroup[0] for shader in made.values()),
        "maxComputeWorkgroupStorageSize": max(shader.shared_bytes for shader in made.values()),
    }


def _volume(size: tuple[int, int, int]) -> int:
    return size[0] * size[1] * size[2]
