"""Kernels of large published shapes need no more than WebGPU guarantees (shaders() refuses the rest)."""

from __future__ import annotations

import pytest
import tvm

from nearfar.targets.jobs import Attend, Embed, Job, Linear, Norm, RopeAppend
from nearfar.targets.kernels import Precision
from nearfar.targets.quantized import Matrix
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
    """Matmuls of a 1B model with m rows, and what stands beside them in other models."""
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


def test_a_window_bounds_the_splits() -> None:
    """What a row sees says how many workgroups walk it: of 512 positions as many as of a short context."""
    paged = 1, 8, 4, 64, 16, 4, 2048, "float32", "float32"
    grids = {
        window: shaders(
            tvm.IRModule({"k": KERNELS["f32"].stages(Attend(*paged, window=window)).stages[0].func}), "f32"
        )["k"].grid
        for window in (None, 512)
    }
    assert grids == {None: (64, 1, 1), 512: (16, 1, 1)}
