"""Every kernel of large published shapes stays inside what each WebGPU device guarantees (shaders() refuses the rest)."""

import pytest
import tvm

from nearfar.targets.jobs import Linear
from nearfar.targets.quantized import Matrix
from nearfar.targets.webgpu import KERNELS
from nearfar.targets.webgpu.codegen import shaders

HIDDEN, INNER, QKV = 2048, 8192, 3072  # Llama 3.2 1B


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("m", [1, 4, 16, 64])
@pytest.mark.parametrize("shape", [(QKV, HIDDEN, "norm"), (HIDDEN, HIDDEN, "residual"), (HIDDEN, INNER, "residual")])
def test_matmuls_of_a_1b_model(shape, m, precision):
    n, k, kind = shape
    activations = KERNELS.activation_dtype(precision)
    norm, residual = (1e-5, False) if kind == "norm" else (None, True)
    job = Linear(
        m=m,
        matrix=Matrix(n, k, 4, 64),
        x_dtype="float32" if norm else activations,
        out_dtype="float32" if residual else activations,
        norm=norm,
        residual=residual,
        x_rows=m,
    )
    (stage,) = KERNELS.linear(job).stages
    made = shaders(tvm.IRModule({"k": stage.func.with_attr("global_symbol", "k")}), precision)
    assert made["k"].shared_bytes <= 16384
