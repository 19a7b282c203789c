"""Jobs for tests of the GPU targets' kernels: every flag, odd sizes, long contexts.

webgpu and vulkan run the same jobs against tests/support/job_reference.py; Chromium compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nearfar.format.scales import IQ4, OF_GGUF, PAIRS, SYMMETRIC, Scales
from nearfar.kernels.contract import Precision
from nearfar.kernels.jobs import (
    Attend,
    Conv,
    Delta,
    Embed,
    Experts,
    Linear,
    Norm,
    Paged,
    Route,
    Ssm,
)
from nearfar.kernels.quantized import Matrix

MATRICES = {
    "q4g32": Matrix(96, 256, 4, 32),
    "q4g64": Matrix(200, 576, 4, 64),
    "q8g32": Matrix(130, 160, 8, 32),
    "q8g64": Matrix(64, 1536, 8, 64),
    "f32odd": Matrix(86, 172, 32),
    "f16odd": Matrix(64, 171, 16),
    "f16": Matrix(512, 64, 16),
}
SCHEMES = {
    f"q{bits}g{group}": Matrix(n, k, bits, group)
    for bits in (2, 3, 4, 5, 6, 8)
    for group, n, k in ((16, 74, 96), (32, 40, 224), (64, 200, 576), (128, 96, 384))
}

SCALES_ALONE = {
    "q4g32s": Matrix(96, 256, 4, 32, scales=SYMMETRIC),
    "q5g32s": Matrix(75, 224, 5, 32, scales=SYMMETRIC),
    "q8g32s": Matrix(130, 160, 8, 32, scales=SYMMETRIC),
}
"""Schemes without biases; matrices with an odd number of columns and of groups."""
TWO_LEVELS = {
    "q2g16k4o": Matrix(75, 512, 2, 16, scales=OF_GGUF["Q2_K"]),
    "q3g16k6": Matrix(74, 256, 3, 16, scales=OF_GGUF["Q3_K"]),
    "q4g32k6o": Matrix(97, 768, 4, 32, scales=OF_GGUF["Q4_K"]),
    "q4g64k6o": Matrix(40, 256, 4, 64, scales=OF_GGUF["Q4_K"]),
    "q5g32k6o": Matrix(41, 256, 5, 32, scales=OF_GGUF["Q5_K"]),
    "q6g16k8": Matrix(75, 768, 6, 16, scales=OF_GGUF["Q6_K"]),
    "q4g32k6ox576": Matrix(75, 576, 4, 32, scales=Scales(6, True, 576)),
    "q3g32k6ox448": Matrix(41, 896, 3, 32, scales=Scales(6, True, 448)),
}
"""Schemes with integer scales; matrices with odd numbers of columns and of superblocks."""
TABLED = {
    "iq4_nl": Matrix(75, 224, 4, 32, scales=IQ4["IQ4_NL"]),
    "iq4_xs": Matrix(97, 768, 4, 32, scales=IQ4["IQ4_XS"]),
}
"""Schemes whose codes stand for the values of a table; matrices with odd numbers of columns and of groups."""
STORED = SCALES_ALONE | TWO_LEVELS | TABLED
"""Schemes with other scales than float16 pairs."""


def linears(dtype: str) -> dict[str, Callable[[int], Linear]]:
    """Jobs with everything that can be fused with a matmul: functions from the number of rows m to a job."""
    q4, dense, q6 = MATRICES["q4g64"], MATRICES["f32odd"], SCHEMES["q6g16"]
    return {
        "norm": lambda m: Linear(m, q4, "float32", dtype, norm=1e-5),
        "bias_residual": lambda m: Linear(m, q4, dtype, "float32", bias=True, residual=True),
        "silu": lambda m: Linear(m, q4, "float32", dtype, norm=1e-5, gate="silu"),
        "silu_bias": lambda m: Linear(m, dense, "float32", dtype, norm=1e-6, gate="silu", bias=True),
        "gelu_tanh": lambda m: Linear(m, q4, "float32", dtype, norm=1e-5, gate="gelu_tanh"),
        "gelu_erf": lambda m: Linear(m, q6, dtype, dtype, gate="gelu_erf", bias=True),
        "relu2_residual": lambda m: Linear(m, dense, dtype, "float32", gate="relu2", residual=True),
        "softcap": lambda m: Linear(m, dense, "float32", dtype, softcap=0.5, bias=True),
        "gate_softcap": lambda m: Linear(
            m, dense, dtype, dtype, gate="silu", softcap=0.3, bias=True, residual=True
        ),
        "rows": lambda m: Linear(
            min(m, 16),
            Matrix(512, 64, 4, 32),
            "float32",
            "float32",
            norm=1e-5,
            rows=True,
            x_rows=m,
            softcap=30.0,
        ),
        "long": lambda m: Linear(m, Matrix(40, 8192, 4, 64), "float32", dtype, norm=1e-5),
        "long_planes": lambda m: Linear(m, Matrix(40, 4096, 5, 128), "float32", dtype, norm=1e-5),
    }


LINEARS = tuple(linears("float32"))
GPU_CLASSES = ("mobile", "integrated", "discrete")


def class_linears(device: str) -> dict[str, tuple[Precision, Linear]]:
    """Matmuls for the kernels of a class of GPUs. Tilings differ by class, so each class covers another part.

    mobile: all bits, groups that a thread reads in parts, dense matrices. integrated: everything that is
    fused, more rows than lanes along k. discrete: the same in float16, codes that are multiplied in pairs,
    and rows in groups of a matvec. Sizes cover rows that do not fill a tile, inputs that do not fill a tile
    (176, 172), and columns that do not fill a workgroup.
    """
    out: dict[str, tuple[Precision, Linear]] = {}
    if device == "mobile":
        names = ("q2g16", "q3g64", "q4g16", "q4g128", "q5g128", "q6g64", "q8g64", "q4g32s", "q5g32s",
                 *TWO_LEVELS, *TABLED)  # fmt: skip
        for i, name in enumerate(names):
            matrix = (SCHEMES | STORED)[name]
            matrix = replace(matrix, n=matrix.n // 4 * 4)
            out[name] = "f32", Linear(1, matrix, "float32", "float32", norm=1e-5)
            out[f"{name}_rows"] = "f32", Linear((16, 33)[i % 2], matrix, "float32", "float32", norm=1e-5)
        ragged, dense = Matrix(88, 176, 8, 16), Matrix(88, 172, 32)
        out["ragged"] = "f32", Linear(16, ragged, "float32", "float32", norm=1e-5, gate="silu")
        for m in (4, 64):
            out[f"f16_{m}"] = "f32", Linear(m, MATRICES["f16"], "float32", "float32")
            out[f"f32_{m}"] = "f16", Linear(m, dense, "float16", "float16", norm=1e-5)
        return out
    precision: Precision = "f32" if device == "integrated" else "f16"
    dtype = "float32" if device == "integrated" else "float16"
    few, many = (4, 64) if device == "integrated" else (1, 33)
    for name, make in linears(dtype).items():
        out[name] = precision, make(few)
        out[f"{name}_rows"] = precision, make(many)
    if device == "discrete":
        for name in ("q2g16", "q2g128", "q4g16", "q4g128", "q8g16", "q8g64"):
            matrix = replace(SCHEMES[name], n=SCHEMES[name].n // 4 * 4)
            out[name] = precision, Linear(1, matrix, "float32", "float32", norm=1e-5)
        alone = replace(SCALES_ALONE["q8g32s"], n=128)
        out["halves_q8g32s"] = precision, Linear(1, alone, dtype, "float32")
        out["halves_q8g32s_rows"] = precision, Linear(33, alone, "float32", dtype, norm=1e-5)
        for name in ("q4g32k6o", "q6g16k8", *TABLED):
            levels = replace(STORED[name], n=136)
            out[name] = precision, Linear(1, levels, dtype, "float32")
            out[f"{name}_rows"] = precision, Linear(33, levels, "float32", dtype, norm=1e-5, gate="silu")
        four = Linear(4, Matrix(136, 576, 4, 64), "float32", dtype, norm=1e-5, gate="silu")
        out["four"] = precision, four
        out |= grouped_linears(dtype)
    out |= {
        f"dense_{bits}_of_{k}_{m}": (
            precision,
            Linear(m, Matrix(64, k, bits), "float32", "float32", residual=True),
        )
        for bits, k in ((32, 172), (16, 100))
        for m in ((16,) if device == "integrated" else (16, 33))
    }  # the inputs end within what a thread reads
    odd = Linear(7, Matrix(136, 576, 4, 64), "float32", dtype, norm=1e-5, gate="silu", residual=True)
    return out | {
        "seven": (precision, odd),
        "narrow": (precision, Linear(200, MATRICES["q4g64"], dtype, dtype)),
        "gate_200": (precision, replace(odd, m=200)),
    }


def grouped_linears(dtype: str) -> dict[str, tuple[Precision, Linear]]:
    """Rows that a discrete GPU's matvec takes in groups: two sizes, each also with one row more; also in
    float32 programs. `tile` has so many columns that a matmul takes the rows.
    """
    made = linears(dtype)
    names = {5: ("silu_bias", "gate_softcap"), 8: ("bias_residual", "gelu_erf"), 16: ("norm", "silu", "long")}
    out: dict[str, tuple[Precision, Linear]] = {
        f"{name}_{m}": ("f16", made[name](m)) for m, several in names.items() for name in several
    }
    eight = Linear(7, SCHEMES["q8g64"], "float16", "float16", bias=True)
    out |= {"q8_7": ("f16", eight), "q8_16": ("f16", replace(eight, m=16))}
    out |= {f"{name}_16_f32": ("f32", linears("float32")[name](16)) for name in ("silu", "bias_residual")}
    return out | {"tile": ("f16", Linear(16, Matrix(4096, 96, 4, 32), "float32", dtype, norm=1e-5))}


FUSED = tuple(name for name in class_linears("integrated") if name in class_linears("discrete"))
"""Names of matmuls that integrated GPUs compute in float32 and discrete ones in float16."""


PIECE = 192 * 576 // 2
"""Bytes of the codes of 192 columns of q4 with 576 inputs."""


def in_pieces(dtype: str) -> dict[str, Linear | Embed]:
    """Jobs over matrices that are stored in pieces if a binding has PIECE bytes: two pieces, six, and a
    smaller last one.
    """
    q4, dense = Matrix(200, 576, 4, 64), Matrix(344, 172, 32)
    return {
        "rows": Linear(
            4, Matrix(384, 576, 4, 64), "float32", "float32", norm=1e-5, rows=True, x_rows=4, softcap=30.0
        ),
        "bias_residual": Linear(1, q4, dtype, "float32", bias=True, residual=True),
        "bias_residual_64": Linear(64, q4, dtype, "float32", bias=True, residual=True),
        "planes": Linear(16, Matrix(150, 576, 6, 64), "float32", dtype, norm=1e-5),
        "levels": Linear(1, Matrix(504, 256, 6, 16, scales=OF_GGUF["Q6_K"]), "float32", dtype, norm=1e-5),
        "gate": Linear(1, dense, dtype, dtype, gate="silu", bias=True, softcap=0.3, residual=True),
        "gate_16": Linear(16, Matrix(512, 576, 4, 64), "float32", dtype, norm=1e-5, gate="gelu_tanh"),
        "embed": Embed(64, Matrix(300, 576, 4, 64), 24.0),
        "embed_f16": Embed(4, Matrix(344, 171, 16)),
    }


NORMS = {
    "narrow": Norm(4, 24, 1e-6),
    "wide": Norm(1, 2304, 1e-5, residual=True),
    "without_weight": Norm(4, 86, 1e-6, weight=False),
    "groups": Norm(16, 1530, 1e-6, groups=6, residual=True),
    "groups_of_own_weights": Norm(4, 60, 1e-6, groups=3, each=True),
    "groups_without_weight": Norm(64, 192, 1e-6, weight=False, groups=3),
}

ROUTES = {
    "softmax": Route(4, 64, 8, normalize=0.0),
    "sigmoid": Route(40, 37, 5, "sigmoid", 1e-6, bias=True, scale=2.5),
    "alone": Route(1, 4, 2, factors=True),
}


def experts(
    m: int, stack: int, top: int, sizes: tuple[int, int, int], bits: int, group: int = 0, **options: Any
) -> Experts:
    """An Experts job of matrices [2·inner, k] and [n, inner]. `sizes`: k, inner, n. The option `gated` says
    whether the first matrix has a gate; without one it is [inner, k].
    """
    k, inner, n = sizes
    how = options.pop("scales", PAIRS)
    first = Matrix(stack * (1 + options.pop("gated", True)) * inner, k, bits, group, stack, how)
    last = Matrix(stack * n, inner, bits, group, stack, how)
    return Experts(m, first, last, top, options.pop("activation", "silu"), **options)


EXPERTS = {
    "f32": experts(1, 6, 2, (48, 20, 44), 32),
    "f16odd": experts(5, 6, 2, (47, 21, 44), 16, activation="relu2"),
    "clamped": experts(4, 5, 3, (64, 96, 40), 4, 32, gate_up_bias=True, down_bias=True, clamp=(1.702, 1.0)),
    "q5": experts(3, 3, 2, (64, 32, 40), 5, 32, down_bias=True),
    "q8": experts(2, 3, 2, (64, 64, 40), 8, 32, activation="gelu_tanh"),
    "q3": experts(2, 3, 2, (64, 64, 40), 3, 16, activation="gelu_erf"),
    "q6": experts(2, 3, 2, (128, 128, 40), 6, 64),
    "plain": experts(3, 5, 2, (64, 96, 40), 4, 32, activation="relu2", gate_up_bias=True, gated=False),
    "scales_alone": experts(2, 3, 2, (64, 64, 40), 4, 32, scales=SYMMETRIC, down_bias=True),
    "q4_k": experts(2, 3, 2, (256, 256, 40), 4, 32, scales=OF_GGUF["Q4_K"], down_bias=True),
    "q6_k": experts(2, 2, 1, (256, 256, 41), 6, 16, scales=OF_GGUF["Q6_K"]),
    "iq4_nl": experts(2, 3, 2, (64, 96, 41), 4, 32, scales=IQ4["IQ4_NL"], down_bias=True),
    "iq4_xs": experts(9, 3, 2, (256, 256, 41), 4, 32, scales=IQ4["IQ4_XS"]),
    "tiles_of_4": experts(9, 3, 2, (47, 21, 44), 16, activation="relu2", gated=False),
    "tiles_of_8": experts(21, 5, 2, (64, 96, 40), 4, 32, gate_up_bias=True, down_bias=True),
    "tiles_of_more_than_threads": experts(64, 257, 9, (32, 32, 8), 8, 32),
}
CUT_EXPERTS = {
    "few": experts(2, 7, 3, (64, 32, 120), 4, 32, gate_up_bias=True, down_bias=True),
    "many": experts(16, 7, 3, (64, 32, 121), 5, 32, gate_up_bias=True, down_bias=True),
    "dense": experts(3, 7, 2, (48, 32, 44), 16, gated=False),
}
"""Jobs whose two stacks a small enough limit cuts into pieces of three, three and one expert."""

STATES: dict[str, Conv | Delta | Ssm] = {
    "conv_one": Conv(1, 48, 3, 16, 4, 4),
    "conv_odd": Conv(33, 101, 7, 16, 4, 4, "silu", True),
    "conv_long": Conv(64, 64, 20, 16, 4, 4),
    "conv_of_one": Conv(16, 5, 1, 16, 4, 4, "sigmoid", True),
    "delta_one": Delta(1, 4, 2, 16, 32, 32, 4, 4, 1e-6),
    "delta_few": Delta(16, 3, 3, 12, 20, 32, 4, 4, 1e-6),
    "delta_odd": Delta(40, 2, 1, 9, 70, 32, 4, 4, 1e-6),
    "delta_tiled": Delta(5, 6, 2, 12, 20, 32, 4, 4, 1e-6, True),
    "delta": Delta(64, 2, 1, 128, 64, 32, 4, 4, 1e-6),
    "ssm_one": Ssm(1, 4, 2, 16, 32, 32, 4, 4),
    "ssm_few": Ssm(16, 6, 3, 12, 20, 32, 4, 4, 0.1, 0.9),
    "ssm_odd": Ssm(40, 3, 1, 9, 37, 32, 4, 4, 0.01),
    "ssm_deep": Ssm(64, 2, 2, 140, 64, 32, 4, 4),
}

SHAPES = [
    (1, 8, 4, 8),
    (4, 9, 3, 64),
    (16, 4, 2, 128),
    (64, 8, 8, 16),
    (1, 32, 2, 64),
    (4, 10, 2, 24),
    (1, 4, 1, 80),
]
SHAPES += [(16, 6, 1, 18), (1, 8, 1, 256), (4, 8, 1, 512), (16, 2, 2, 512)]


def paged(kind: type[Paged], shape: tuple[int, int, int, int], dtype: str, **flags: Any) -> Any:
    """A job with `shape` (rows, heads, kv heads, head size) and 320 positions a sequence."""
    return kind(
        *shape, 16, 4, 20, dtype, dtype, **{"scale": shape[-1] ** -0.5} if kind is Attend else {}, **flags
    )


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"norm_eps": 1e-6},
    "norm_after": {"norm_eps": 1e-6, "norm_after": True},
    "norm_all": {"norm_eps": 1e-5, "norm_all": True},
    "norm_all_after": {"norm_eps": 1e-5, "norm_all": True, "norm_after": True, "v_norm_eps": 1e-6},
    "norope": {"rope": False},
    "norope_norm_q_scale": {"rope": False, "norm_eps": 1e-6, "q_scale": (0.1, 64.0)},
    "norope_norm_after": {"rope": False, "norm_eps": 1e-6, "norm_after": True},
    "q_scale": {"q_scale": (0.25, 100.0)},
    "v_norm": {"v_norm_eps": 1e-6},
    "norms": {"norm_eps": 1e-6, "v_norm_eps": 1e-5, "q_scale": (0.1, 100.0)},
    "q": {"append": False},
    "q_norm": {"append": False, "norm_eps": 1e-6, "v_norm_eps": 1e-6},
    "q_norm_after": {"append": False, "norm_eps": 1e-6, "norm_after": True, "q_scale": (0.1, 100.0)},
    "q_norm_all": {"append": False, "norm_eps": 1e-6, "norm_all": True},
}

ATTENDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 37},
    "window_of_one": {"window": 1},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 100, "softcap": 50.0, "sinks": True},
}


RUNS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "one_sequence": ((1, 0, 64),),
    "one_goes_on": ((2, 97, 63),),
    "decode": tuple((slot, length - 1, 1) for slot, length in enumerate((63, 64, 65, 1))),
    "borders": tuple((slot, length - 1, 1) for slot, length in enumerate((128, 129, 319, 320))),
    "mixed": (
        (0, 62, 1),
        (1, 64, 1),
        (2, 0, 3),
        (3, 190, 37),
        (-1, 0, 6),
        (0, 0, 2),
        (1, 128, 1),
        (0, 127, 9),
    ),
    "padding": ((-1, 0, 64),),
}
"""Rows of steps as runs: slot (-1: padding), position of the first row, number of rows. Remaining rows are
padding.
"""
LONG_RUN = ((0, 32708, 60),)


def long_attention(m: int, dtype: str, **flags: Any) -> Attend:
    """Attention over 32,768 positions of one sequence."""
    return replace(paged(Attend, (m, 2, 1, 16), dtype, **flags), slots=1, pages_per_slot=2048)
