"""Runs the stages of one job on a wgpu device, for kernel tests."""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from nearfar.kernels.contract import Precision, Staged
from nearfar.targets.webgpu import Shader, shaders

wgpu = pytest.importorskip("wgpu", reason="the package wgpu is not installed")
os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # Without this variable Mesa complains on stderr.

KEPT = 64
"""Kernels whose shaders and pipelines are kept: a test runs a kernel several times."""
STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST


@lru_cache(maxsize=1)
def device() -> Any:
    """A device with shader-f16 where the adapter has it; skips where there is no adapter."""
    with contextlib.suppress(ImportError):
        # Triton's LLVM is loaded before lavapipe's: see edge_runtime/executors/webgpu/device.py.
        import_module("triton._C.libtriton")
    try:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except Exception as error:
        pytest.skip(f"no WebGPU adapter through wgpu: {error}")
    features = ["shader-f16"] if "shader-f16" in adapter.features else []
    return adapter.request_device_sync(required_features=features)


def compile_staged(staged: Staged, precision: Precision) -> list[Shader]:
    """The shader of each stage."""
    return [_shader(stage.func, precision) for stage in staged.stages]


@lru_cache(maxsize=KEPT)
def _shader(func: tirx.PrimFunc, precision: Precision) -> Shader:
    """The shader of a kernel."""
    (made,) = shaders(tvm.IRModule({"kernel": func}), precision).values()
    return made


@lru_cache(maxsize=KEPT)
def _pipeline(source: str, entry: str) -> Any:
    """The pipeline of a shader on the device."""
    module = device().create_shader_module(code=source)
    return device().create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": entry})


def run(staged: Staged, precision: Precision, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the launches; gives the arrays afterwards."""
    gpu = device()
    if precision == "f16" and "shader-f16" not in gpu.features:
        pytest.skip("the adapter lacks shader-f16")
    buffers = {
        name: gpu.create_buffer_with_data(data=_padded(a), usage=STORAGE) for name, a in arrays.items()
    }
    for i, (shape, dtype) in enumerate(staged.scratch):
        size = -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 4) * 4
        buffers[f"scratch:{i}"] = gpu.create_buffer(size=size, usage=STORAGE)
    encoder = gpu.create_command_encoder()
    for stage, shader in zip(staged.stages, compile_staged(staged, precision), strict=True):
        _dispatch(gpu, encoder, shader, [buffers[stage.args[i]] for i in shader.params])
    gpu.queue.submit([encoder.finish()])
    return {
        name: np.frombuffer(gpu.queue.read_buffer(buffers[name]), np.uint8)[: a.nbytes]
        .view(a.dtype)
        .reshape(a.shape)
        for name, a in arrays.items()
    }


def _padded(array: np.ndarray) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    return data + bytes(-len(data) % 4)


def _dispatch(gpu: Any, encoder: Any, shader: Shader, buffers: list[Any]) -> None:
    pipeline = _pipeline(shader.source, shader.entry)
    uniform = gpu.create_buffer_with_data(
        data=np.array([shader.grid[0] - 1], np.uint32).tobytes(), usage=wgpu.BufferUsage.UNIFORM
    )
    entries = [{"binding": i, "resource": {"buffer": b}} for i, b in enumerate([*buffers, uniform])]
    group = gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(*shader.grid)
    compute.end()
