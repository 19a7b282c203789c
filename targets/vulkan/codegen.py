"""Generates SPIR-V for lowered kernels: one module for each PrimFunc, with the facts that a plan needs to
launch it.

TVM's build calls the function registered here as `target.build.vulkan` with the lowered device functions; the
released TVM has no such function. It returns a source module, whose text is JSON: words in base64 and the
interface of each kernel.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from nearfar.errors import BuildError
from nearfar.targets.gpu.sources import device_sources, kernels

from .opcodes import Capability
from .spirv import ENTRY, Builder, Size3, to_bytes
from .walker import Interface, Walker

# An error keeps its type when it passes through TVM's build.
tvm_ffi.register_error("BuildError", BuildError)
FEATURES = {
    Capability.FLOAT16: "shaderFloat16",
    Capability.INT64: "shaderInt64",
    Capability.STORAGE_BUFFER_8BIT: "storageBuffer8BitAccess",
    Capability.STORAGE_BUFFER_16BIT: "storageBuffer16BitAccess",
    Capability.GROUP_NON_UNIFORM: "subgroupBasic",
    Capability.GROUP_NON_UNIFORM_ARITHMETIC: "subgroupArithmetic",
    Capability.GROUP_NON_UNIFORM_SHUFFLE: "subgroupShuffle",
    Capability.DOT_PRODUCT: "shaderIntegerDotProduct",
    Capability.VULKAN_MEMORY_MODEL: "vulkanMemoryModel",
    Capability.COOPERATIVE_MATRIX: "cooperativeMatrix",
}
"""The device feature that a capability needs, by the manifest's names."""


@dataclass(frozen=True)
class Module:
    """One kernel as SPIR-V.

    `params[i]` is the index of the PrimFunc parameter at binding i, `access[i]` its access.
    """

    code: bytes
    entry: str
    params: tuple[int, ...]
    access: tuple[str, ...]
    grid: Size3
    workgroup: Size3
    shared_bytes: int
    subgroup_size: int
    features: tuple[str, ...]


def modules(mod: tvm.IRModule) -> dict[str, Module]:
    """The module of every PrimFunc of `mod`, by its name."""
    made = {}
    funcs = kernels(mod)
    for name, source in device_sources(mod, "vulkan").items():
        found = json.loads(source)
        if len(found) != 1:
            raise BuildError(f"kernel {name}: {len(found)} device functions, expected 1: {', '.join(found)}")
        made[name] = _module(name, funcs[name], next(iter(found.values())))
    return made


def _module(name: str, func: tirx.PrimFunc, made: dict[str, Any]) -> Module:
    position = {str(param.name): i for i, param in enumerate(func.params)}
    return Module(
        code=base64.b64decode(made["code"]),
        entry=ENTRY,
        params=tuple(position[param] for param in made["names"]),
        access=tuple(made["access"]),
        grid=tuple(made["grid"]),
        workgroup=tuple(made["workgroup"]),
        shared_bytes=made["shared_bytes"],
        subgroup_size=made["subgroup_size"],
        features=tuple(made["features"]),
    )


def generate(name: str, func: tirx.PrimFunc) -> tuple[bytes, Interface, tuple[str, ...]]:
    """The module of one lowered device function, its interface, and the device features that it needs."""
    builder = Builder()
    try:
        interface = Walker(name, func, builder).walk()
        code = to_bytes(builder.words(name, interface.workgroup))
    except BuildError as error:
        raise BuildError(f"kernel {name}: {error}") from error
    return code, interface, tuple(sorted(FEATURES[c] for c in builder.capabilities if c in FEATURES))


def build(mod: tvm.IRModule, _target: tvm.target.Target) -> Any:
    """Compile the device functions of `mod` for TVM's build; returns a runtime module."""
    out: dict[str, Any] = {}
    for variable, func in mod.functions_items():
        # TVM adds `_kernel` to the device's side of a function.
        name = str(variable.name_hint).removesuffix("_kernel")
        code, interface, features = generate(name, func)
        record = {"code": base64.b64encode(code).decode(), "features": features}
        out[name] = {**dataclasses.asdict(interface), **record}
    return tvm.get_global_func("runtime.SourceModuleCreate")(json.dumps(out), "spirv")


tvm.register_global_func("target.build.vulkan", build, override=True)
