"""Kernels of large published shapes stay within the limits that WebGPU guarantees (shaders() checks most of
them).
"""

from __future__ import annotations

import math

import pytest
import tvm

from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import Attend, Embed, Job, Linear, Norm, RopeAppend
from nearfar.kernels.quantized import Matrix
from nearfar.targets.gpu import variant
from nearfar.targets.gpu.classes import CLASSES
from nearfar.targets.webgpu import VARIANTS
from nearfar.targets.webgpu.codegen import shaders

KERNELS = {variant.precision: variant.kernels for variant in VARIANTS if variant.device_class == "software"}
HIDDEN, INNER, QKV = 2048, 8192, 3072  # Llama 3.2 1B
ATTENTION = {  # heads, kv heads, head size
    "llama 3.1 8b": (32, 8, 128), "gemma 2 2b": (8, 4, 256), "gemma 3 270m": (4, 1, 256),
    "gemma 4 global": (8, 1, 512),
    "wide": (16, 1, 512), "olmo 2 7b": (32, 32, 128), "phi 3.5": (32, 32, 96), "smollm 135m": (9, 3, 64),
    "all": (71, 1, 64),
}  # fmt: skip


def jobs(precision: Precision) -> dict[str, Job]:
    """Matmuls of a 1B model with m rows, and other jobs of such models."""
    dtype, made = KERNELS[precision].activations, {}
    for m in (1, 4, 16, 64):
        made[f"qkv_{m}"] = Linear(m, Matrix(QKV, HIDDEN, 4, 64), "float32", dtype, norm=1e-5)
        for k in (HIDDEN, INNER):
            made[f"out_{k}_{m}"] = Linear(m, Matrix(HIDDEN, k, 4, 64), dtype, "float32", residual=True)
    for m in (1, 256):
        for bits, group in ((2, 16), (3, 16), (5, 128), (6, 16), (6, 64), (8, 128)):
            matrix = Matrix(2 * INNER, HIDDEN, bits, group)
            made[f"q{bits}g{group}_{m}"] = Linear(
                m, matrix, dtype, dtype, norm=1e-6, gate="gelu_tanh", bias=True
            )
            made[f"embed_q{bits}g{group}_{m}"] = Embed(m, matrix, 2304**0.5)
        made[f"norm_{m}"] = Norm(m, 8192, 1e-6, residual=True)
        for name, (heads, kv_heads, dim) in ATTENTION.items():
            paged = m, heads, kv_heads, dim, 16, 16, 2048, dtype, dtype
            key = f"{name}_{m}".replace(" ", "_").replace(".", "_")
            made[f"attend_{key}"] = Attend(*paged, softcap=50.0, sinks=True, window=512)
            made[f"rope_{key}"] = RopeAppend(*paged, norm_eps=1e-6, norm_after=True, v_norm_eps=1e-6)
            made[f"rope_all_{key}"] = RopeAppend(*paged, norm_eps=1e-6, norm_all=True, q_scale=(0.1, 16384.0))
    return made


@pytest.mark.parametrize("precision", ["f32", "f16"])
def test_large_shapes(precision: Precision) -> None:
    """The limits are checked by shaders() itself."""
    funcs = {
        f"{name}_{i}": stage.func
        for name, job in jobs(precision).items()
        for i, stage in enumerate(KERNELS[precision].stages(job).stages)
    }
    made = shaders(tvm.IRModule(funcs), precision)
    assert made.keys() == funcs.keys()
    assert max(shader.shared_bytes for shader in made.values()) <= 16384


@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_attention_of_each_class(name: str) -> None:
    """Limits are checked by shaders(); the grid and the scratch stay small however long a sequence may be."""
    kernels, funcs = variant(CLASSES[name], "f32", False).kernels, {}
    for model, (heads, kv_heads, dim) in ATTENTION.items():
        for m in (1, 16, 256):
            job = Attend(
                m, heads, kv_heads, dim, 16, 16, 2048, "float32", "float32", softcap=50.0, sinks=True
            )
            staged = kernels.stages(job)
            funcs |= {
                f"{model.split()[0]}_m{m}_{i}_{dim}": stage.func for i, stage in enumerate(staged.stages)
            }
            assert all(math.prod(shape) * 4 <= 64 << 20 for shape, _ in staged.scratch)
    made = shaders(tvm.IRModule(funcs), "f32")
    assert max(math.prod(shader.grid) for key, shader in made.items() if "_m1_" in key) <= 2048


@pytest.mark.parametrize("name", ["mobile", "integrated", "discrete"])
def test_a_window_bounds_the_parts(name: str) -> None:
    """Blocks of 64 positions of 4 kv heads; a long context has at most 128 parts, of several blocks each."""
    kernels, paged = variant(CLASSES[name], "f32", False).kernels, (1, 8, 4, 64, 16, 4)
    cases = {"short": (16, None), "window": (2048, 512), "long": (2048, None)}
    staged = {
        case: kernels.stages(Attend(*paged, pages, "float32", "float32", window=window))
        for case, (pages, window) in cases.items()
    }
    made = shaders(tvm.IRModule({case: each.stages[0].func for case, each in staged.items()}), "f32")
    grids = {case: shader.grid for case, shader in made.items()}
    assert grids == {"short": (16, 1, 1), "window": (32, 1, 1), "long": (512, 1, 1)}


PUBLISHED = {  # rows of the matrix, inputs, whether a gated pair
    "1b down": (2048, 8192, False), "4b gate_up": (2 * 9728, 2560, True), "8b down": (4096, 14336, False),
}  # fmt: skip


@pytest.mark.parametrize("device", ["mobile", "integrated", "discrete"])
def test_shapes_of_published_models_by_class(device: str) -> None:
    """The launches that each class wants (classes.py), within WebGPU's limits."""
    wanted = CLASSES[device]
    kernels = variant(wanted, "f32", False).kernels
    funcs = {}
    for name, (n, k, gated) in PUBLISHED.items():
        for m in (1, 7, 16, 256):
            matrix, gate = Matrix(n, k, 4, 64), "silu" if gated else None
            job = Linear(m, matrix, "float32", "float32", norm=1e-5, bias=True, gate=gate)
            funcs[f"{name}_{m}".replace(" ", "_")] = kernels.stages(job).stages[0].func
    for name, shader in shaders(tvm.IRModule(funcs), "f32").items():
        threads = math.prod(shader.workgroup)
        assert threads % wanted.subgroup == 0, name
        assert threads <= (wanted.threads if name.endswith("_1") else wanted.tile_threads), name
        if name.endswith("_1"):
            assert threads * shader.grid[0] >= wanted.launched, name
        assert "array<vec4<u32>>" in shader.source
        assert "w0_ptr : array<u32>" not in shader.source
        assert shader.shared_bytes <= (8192 if device == "mobile" else 16384)


def test_products_of_float16_are_fused_vectors() -> None:
    """In a workgroup's tile of many rows, seven of the eight products of a chain are added as they are
    computed.
    """
    job = Linear(256, Matrix(64, 64, 4, 64), "float16", "float16")
    func = variant(CLASSES["discrete"], "f16", False).kernels.stages(job).stages[0].func
    source = shaders(tvm.IRModule({"k": func}), "f16")["k"].source
    assert "var chain : array<vec4<f16>, 4>;" in source
    assert source.count("] = fma(weight[0i], vec4<f16>(") == 7 * 4


def test_a_window_bounds_the_splits() -> None:
    """The positions that a row sees determine the number of workgroups: a window of 512 needs as many as a
    short context.
    """
    paged = 1, 8, 4, 64, 16, 4, 2048, "float32", "float32"
    grids = {
        window: shaders(
            tvm.IRModule({"k": KERNELS["f32"].stages(Attend(*paged, window=window)).stages[0].func}), "f32"
        )["k"].grid
        for window in (None, 512)
    }
    assert grids == {None: (64, 1, 1), 512: (16, 1, 1)}
