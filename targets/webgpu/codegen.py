"""Generates WGSL for lowered kernels: one shader for each PrimFunc, with the facts that a plan needs to
launch it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import tvm
from tvm import tirx

from nearfar.errors import BuildError
from nearfar.kernels.contract import Precision
from nearfar.targets.gpu.sources import device_sources, kernels

MAX_THREADS = 256
MAX_SHARED_BYTES = 32768  # twice the guaranteed limit; discrete GPUs have it, and a program states its need
MAX_STORAGE_BUFFERS = 8

_BINDING = re.compile(
    r"@group\(0\) @binding\((\d+)\) var<storage, (read|read_write)> (\w+?)_ptr : array<([\w<>]+)>;"
)
_ENTRY = re.compile(r"@workgroup_size\((\d+), (\d+), (\d+)\)\s*fn (\w+)\(")
_SHARED = re.compile(r"var<workgroup> \w+ : array<(?:vec(\d)<)?(\w+?)>?, (\d+)>;")
_HEADER = re.compile(r"^(?://-+\n)?// Function: \w+\n(?://-+\n)?", re.MULTILINE)
FUNCTIONS = {
    "low_half": "fn low_half(word : u32) -> f32 { return unpack2x16float(word).x; }\n",
    "high_half": "fn high_half(word : u32) -> f32 { return unpack2x16float(word).y; }\n",
}


def _halves(name: str, half: str) -> str:
    values = ", ".join(f"unpack2x16float(words.{place}).{half}" for place in "xyzw")
    return f"fn {name}(words : vec4<u32>) -> vec4<f32> {{ return vec4<f32>({values}); }}\n"


FUNCTIONS |= {"low_halves": _halves("low_halves", "x"), "high_halves": _halves("high_halves", "y")}
FUNCTIONS["four_halves"] = (
    "fn four_halves(words : vec2<u32>) -> vec4<f32> { return vec4<f32>(unpack2x16float(words.x), "
    "unpack2x16float(words.y)); }\n"
)
# naga (Firefox, wgpu) has no bitcast to float16: https://github.com/gfx-rs/wgpu/issues/8896. Compilers remove
# a conversion of float16 to float32 and back. Once naga has the bitcast, this workaround can go; the
# generated text is valid with it too.
BITCAST, HALVES = "bitcast<vec4<f16>>(", "as_halves("
FUNCTIONS["as_halves"] = (
    "fn as_halves(words : vec2<u32>) -> vec4<f16> { return vec4<f16>(vec4<f32>(unpack2x16float(words.x), "
    "unpack2x16float(words.y))); }\n"
)
LANGUAGE = {"dot4I8Packed": "packed_4x8_integer_dot_product"}
"""WGSL functions that not every implementation has, with the language feature that each needs."""
_BYTES = {"f32": 4, "i32": 4, "u32": 4, "f16": 2}


@dataclass(frozen=True)
class Shader:
    """One kernel as WGSL.

    `params[i]` is the index of the PrimFunc parameter at `@binding(i)`, `access[i]` its access. A parameter
    that the kernel does not use has no binding. `language`: language features of WGSL that it uses.
    """

    source: str
    entry: str
    params: tuple[int, ...]
    access: tuple[str, ...]
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    shared_bytes: int
    language: tuple[str, ...]


def shaders(mod: tvm.IRModule, precision: Precision) -> dict[str, Shader]:
    """The shader of every PrimFunc of `mod`, by its name."""
    funcs = kernels(mod)
    return {
        name: _shader(name, funcs[name], source, precision)
        for name, source in device_sources(mod, "webgpu").items()
    }


def grid_of(func: tirx.PrimFunc) -> tuple[int, int, int]:
    """The constant extents of blockIdx.x, y and z."""
    extents = {"blockIdx.x": 1, "blockIdx.y": 1, "blockIdx.z": 1}
    pending: list[object] = [func.body]
    while pending:
        node = pending.pop()
        if (
            isinstance(node, tirx.For)
            and node.thread_binding is not None
            and node.thread_binding.thread_tag in extents
        ):
            extents[node.thread_binding.thread_tag] = int(node.extent)
        elif (
            isinstance(node, tirx.AttrStmt)
            and node.attr_key == "thread_extent"
            and node.node.thread_tag in extents
        ):
            extents[node.node.thread_tag] = int(node.value)
        for field in ("body", "block", "then_case", "else_case"):  # TVM 0.27 has no visitor for Python
            child = getattr(node, field, None)
            pending += [child] if child is not None else []
        pending += list(getattr(node, "seq", ()))
    return extents["blockIdx.x"], extents["blockIdx.y"], extents["blockIdx.z"]


def _shader(name: str, func: tirx.PrimFunc, source: str, precision: Precision) -> Shader:
    """Parse the shader's interface from the generated source, and check it against the limits of WebGPU
    devices.
    """
    source = _HEADER.sub("", source).strip().replace(BITCAST, HALVES) + "\n"
    source += "".join(text for name, text in FUNCTIONS.items() if f"{name}(" in source)
    bindings = sorted(_BINDING.findall(source), key=lambda binding: int(binding[0]))
    position = {param.name: i for i, param in enumerate(func.params)}
    entries = _ENTRY.findall(source)
    if len(entries) != 1:
        raise BuildError(f"kernel {name}: {len(entries)} entry points, expected 1")
    x, y, z, entry = entries[0]
    workgroup = int(x), int(y), int(z)
    arrays = _SHARED.findall(source)
    shared = sum(int(lanes or 1) * _BYTES[dtype] * int(size) for lanes, dtype, size in arrays)
    if "enable f16;" in source and precision != "f16":
        raise BuildError(f"kernel {name}: uses f16 in the {precision} program")
    for what, value, limit in (
        ("threads a workgroup", workgroup[0] * workgroup[1] * workgroup[2], MAX_THREADS),
        ("bytes of workgroup memory", shared, MAX_SHARED_BYTES),
        ("storage buffers", len(bindings), MAX_STORAGE_BUFFERS),
    ):
        if value > limit:
            raise BuildError(f"kernel {name}: {value} {what}, no device is asked for more than {limit}")
    return Shader(
        source=source,
        entry=entry,
        params=tuple(position[buffer] for _, _, buffer, _ in bindings),
        access=tuple(access for _, access, _, _ in bindings),
        grid=grid_of(func),
        workgroup=workgroup,
        shared_bytes=shared,
        language=tuple(feature for name, feature in LANGUAGE.items() if f"{name}(" in source),
    )
