"""Jobs for tests of the GPU targets' kernels: every flag, odd sizes, rows of padding, long contexts.

webgpu and vulkan run the same jobs against tests/support/job_reference.py; Chromium compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nearfar.edge_runtime.executors.quantized_pages import pages_of, parts_of
from nearfar.format.kv import BITS
from nearfar.format.manifest import Float
from nearfar.format.scales import IQ4, OF_GGUF, PAIRS, SYMMETRIC, Scales
from nearfar.kernels.contract import Kernels, Precision, Staged
from nearfar.kernels.jobs import (
    Activation,
    Attend,
    Conv,
    Delta,
    Embed,
    Experts,
    GraphJob,
    Linear,
    Norm,
    Paged,
    Project,
    RopeAppend,
    Route,
    Ssm,
)
from nearfar.kernels.quantized import Matrix

from . import quantized_kv
from .job_reference import (
    ACTIVATIONS,
    PLAIN,
    matrices_of,
    random_inputs,
    random_matrix,
    reference,
    rounding_weights,
    state_inputs,
)

Run = Callable[[Staged, Precision, dict[str, np.ndarray]], dict[str, np.ndarray]]
# Relative to the largest output: float32 sums in another order; float16 stores activations with 11 bits.
TOLERANCE = {"f32": 2e-5, "f16": 1e-3}
NOT_THERE = 1 << 28
"""The number of a page that no cache has: a kernel that reads it reads far beyond its buffer."""

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


def check_runs(
    kernels: Kernels, run: Run, precision: Precision, job: Attend, runs: tuple[tuple[int, int, int], ...]
) -> None:
    """Check attention in a step whose rows are `runs`, as many as the job has. Pages that no row sees do not
    exist.
    """
    check(kernels, run, precision, job, arrays=step_inputs(job, runs, np.random.default_rng(1)))


def step_inputs(
    job: Attend, runs: tuple[tuple[int, int, int], ...], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random inputs of a step whose rows are those of `runs`."""
    arrays = paged_inputs(job, rng)
    rows = [(slot, first + i) for slot, first, count in runs for i in range(count)][: job.m]
    arrays["positions"][:] = -1
    for i, (slot, position) in enumerate(rows):
        arrays["slots"][i], arrays["positions"][i] = max(slot, 0), position if slot >= 0 else -1
    pages = rng.permutation(job.slots * job.pages_per_slot).astype(np.int32)
    arrays["page_table"] = only_seen(job, arrays, pages.reshape(job.slots, job.pages_per_slot))
    return arrays


def check_split(
    kernels: Kernels,
    run: Run,
    precision: Precision,
    attend: Attend,
    linear: Linear,
    runs: tuple[tuple[int, int, int], ...],
) -> None:
    """Check attention in parts, followed by the matmul that combines them, against separate attention and
    matmul.
    """
    split = kernels.split(attend, linear)
    assert split is not None
    rng = np.random.default_rng(2)
    arrays = step_inputs(attend, runs, rng)
    whole = reference(attend, arrays)["out"]
    parts = replace(attend, split=split, sinks=False)
    shape, dtype = parts.out
    got = run(kernels.stages(parts), precision, {**arrays, "out": np.full(shape, np.nan, dtype)})
    combined = replace(linear, split=split, split_heads=attend.heads)
    given = inputs(kernels, linear, rng)
    want = reference(linear, {**given, "x": whole})["out"]
    del given["x"], given["w"]
    given |= {name: arrays[name] for name in ("positions", "sinks") if name in arrays}
    given |= {"partial": got["out"], "out": np.full(combined.out[0], 7, np.float32)}
    close(run(kernels.stages(combined), precision, given)["out"].astype(np.float64), want, precision)


def check(
    kernels: Kernels,
    run: Run,
    precision: Precision,
    job: GraphJob,
    seed: int = 1,
    arrays: dict[str, np.ndarray] | None = None,
) -> None:
    """Run a job, with random inputs if none are given, and compare everything that it writes; all else must
    stay unchanged.
    """
    arrays = inputs(kernels, job, np.random.default_rng(seed)) if arrays is None else arrays
    shape, dtype = job.out
    arrays["out"] = np.full(shape, 7, dtype)
    given = {name: array for name, array in arrays.items() if name not in PLAIN}
    got = _run_over_codes(kernels, run, precision, job, given)
    padding = isinstance(job, RopeAppend) and arrays["positions"][: job.m] < 0
    for name, want in reference(job, arrays).items():
        array = got[name].astype(np.float64)
        if name == "out":
            assert (array[job.m :] == 7).all()
            array = array[: job.m]
            assert np.isfinite(array).all()
            array, want = (a[~np.broadcast_to(padding, len(a))] for a in (array, want))
        elif (cached := _paged(job)) is not None and cached.kv_dtype in BITS:
            weights = rounding_weights(job, arrays) if name == "k_cache" else None
            alike = 0.9 if precision == "f32" else 0.5
            quantized_kv.check(array, want, arrays[name], cached.kv_dtype, weights, alike)
            continue
        close(array, want.astype(np.float64), precision)


def _paged(job: GraphJob | Project) -> Paged | None:
    """The part of a job that is about a cache; None for other jobs."""
    if isinstance(job, Project):
        return job.paged
    return job if isinstance(job, Paged) else None


def _run_over_codes(
    kernels: Kernels, run: Run, precision: Precision, job: GraphJob, given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run a job over quantized caches, which are given and returned as numbers; words that the job must not
    write must stay unchanged.
    """
    paged = _paged(job)
    if paged is None or paged.kv_dtype not in BITS:
        return run(kernels.stages(job), precision, given)
    numbers = {name: given[name] for name in ("k_cache", "v_cache") if name in given}
    held = {
        name: pages_of(quantized_kv.parts(array, paged.kv_dtype), paged.kv_dtype, innermost=False)
        for name, array in numbers.items()
    }
    got = run(kernels.stages(job), precision, given | held)
    for name, array in numbers.items():
        parts = parts_of(got[name], paged.head_dim, paged.kv_dtype, innermost=False)
        before = parts_of(held[name], paged.head_dim, paged.kv_dtype, innermost=False)
        same = np.all([(parts[part] == before[part]).all(-1) for part in parts], axis=0)
        got[name] = np.where(same[..., None], array, quantized_kv.rows(parts, paged.kv_dtype))
    return got


def close(got: np.ndarray, want: np.ndarray, precision: Precision) -> None:
    """Check that arrays are equal within the precision's rounding, relative to the largest number."""
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-6)
    assert error < TOLERANCE[precision], error


def inputs(kernels: Kernels, job: GraphJob, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs; matrices packed as `w0`, `w1`, …, and as the numbers that they represent."""
    if isinstance(job, Paged):
        return paged_inputs(job, rng)
    if isinstance(job, Conv | Delta | Ssm):
        return state_inputs(job, rng)
    arrays = random_inputs(job, rng)
    if isinstance(job, Route):  # the last row but one is padding
        arrays["positions"][: job.m] = np.arange(job.m)
        arrays["positions"][max(job.m - 2, 1) : job.m - 1] = -1
    places = 0
    for name, matrix in matrices_of(job).items():
        tensor, arrays[name] = random_matrix(rng, matrix)
        packed = kernels.pack(matrix, tensor)
        for part, array in zip(kernels.parts(matrix), packed, strict=True):
            assert (part.shape, part.dtype) == (array.shape, str(array.dtype))
            arrays[f"w{places}"] = array
            places += 1
    return arrays


def paged_inputs(job: Attend | RopeAppend, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs: the last rows of three sequences by turns, then one row of padding. Pages that no row
    sees do not exist.
    """
    context = job.pages_per_slot * job.page_size
    pages = job.slots * job.pages_per_slot
    arrays = random_inputs(job, rng, pages, context)
    lengths = {2: context - 9, 0: min(70, context), 3: min(129, context)} if job.slots > 3 else {0: context}
    used = max(job.m - 1, 1)
    for i in range(used):
        slot = list(lengths)[i % len(lengths)]
        arrays["positions"][i] = lengths[slot] - 1 - i // len(lengths)
        if "slots" in arrays:
            arrays["slots"][i] = slot
    if "page_table" in arrays:
        table = rng.permutation(pages).astype(np.int32).reshape(job.slots, job.pages_per_slot)
        arrays["page_table"] = only_seen(job, arrays, table)
    return arrays


def only_seen(job: Attend | RopeAppend, arrays: dict[str, np.ndarray], table: np.ndarray) -> np.ndarray:
    """The page table without the pages that no row needs."""
    made = np.full_like(table, NOT_THERE)
    for slot, position in zip(arrays["slots"][: job.m], arrays["positions"][: job.m], strict=True):
        last = position // job.page_size
        first = last if isinstance(job, RopeAppend) else 0
        if isinstance(job, Attend) and job.window is not None:
            first = max(0, position + 1 - job.window) // job.page_size
        if position >= 0:
            made[slot, first : last + 1] = table[slot, first : last + 1]
    return made


def long_attention(m: int, dtype: str, **flags: Any) -> Attend:
    """Attention over 32,768 positions of one sequence."""
    return replace(paged(Attend, (m, 2, 1, 16), dtype, **flags), slots=1, pages_per_slot=2048)


def check_saturation(kernels: Kernels, run: Run, m: int, gate: Activation | None) -> None:
    """Check that values beyond 65,504 are stored as 65,504, since an infinity would turn all that follows
    into NaN; NaN stays NaN.
    """
    job = Linear(m, Matrix(64, 64, 16), "float32", "float16", gate=gate)
    rng = np.random.default_rng(3)
    arrays = inputs(kernels, job, rng)
    weights = arrays.pop("w") * 8  # weights of about unit size
    (arrays["w0"],) = kernels.pack(job.matrix, weights)
    x = rng.standard_normal((m, 64)).astype(np.float32) * np.float32(1e5)
    x[0, 3] = np.nan
    arrays |= {"x": x, "out": np.zeros((m, job.columns), np.float16)}
    with np.errstate(over="ignore"):
        want = x.astype(np.float64) @ weights.T
        if gate is not None:
            want = ACTIVATIONS[gate](want[:, :32]) * want[:, 32:]
    got = run(kernels.stages(job), "f16", arrays)["out"]
    assert np.isnan(got[0]).all()
    beyond, inside = np.abs(want[1:]) > 7e4, np.abs(want[1:]) < 6e4
    assert m == 1 or beyond.mean() > 0.3
    assert (got[1:][beyond] == np.copysign(np.float16(65504), want[1:][beyond])).all()
    assert np.abs(got[1:][inside] - want[1:][inside]).max(initial=0) < 100
    got = run(kernels.stages(job), "f16", {**arrays, "x": np.full((m, 64), 1e6, np.float32)})["out"]
    assert np.abs(got).max() == 65504


UNEVEN: dict[str, Callable[[np.random.Generator, np.ndarray], None]] = {
    "tiny": lambda rng, x: np.multiply(x, 1e-7, out=x),
    "huge": lambda rng, x: np.multiply(x, 1e8, out=x),
    "outliers": lambda rng, x: np.multiply.at(x, (..., rng.integers(0, x.shape[1], 3)), 1e4),
    "growing": lambda rng, x: np.multiply(x, np.geomspace(1e-9, 1e9, x.shape[1]), out=x),
    "sparse": lambda rng, x: np.multiply(x, rng.random(x.shape) < 0.02, out=x),
}
"""Changes of normal inputs after which products in float16 would lose or overflow something."""


def check_uneven(kernels: Kernels, run: Run, name: str, dtype: Float) -> None:
    """Check products of an f16 program with inputs of any size, of one row and of four, with and without a
    norm.

    Rows of float16 are multiplied in float16, rows of float32 in float32. The largest inputs are the largest
    numbers of float16.
    """
    rng, most = np.random.default_rng(5), float(np.finfo(dtype).max)
    for bits, group, m, norm in ((4, 64, 1, None), (4, 32, 4, 1e-30), (8, 64, 1, None), (2, 16, 1, None)):
        job = Linear(m, Matrix(96, 576, bits, group), dtype, "float32", norm=norm)
        arrays = inputs(kernels, job, rng)
        x = arrays["x"].astype(np.float64)
        UNEVEN[name](rng, x)
        check(kernels, run, "f16", job, arrays={**arrays, "x": np.clip(x, -most, most).astype(dtype)})


def check_functions(kernels: Kernels, run: Run) -> None:
    """Check activations within 1e-6 (of 1, or of the value), and softcaps of numbers much larger or smaller
    than the cap.
    """
    x = np.concatenate([np.linspace(-12, 12, 59), [1e-4, -0.02, 0.3, 300, -300]]).astype(np.float32)
    (one,) = kernels.pack(Matrix(64, 64, 32), np.eye(64, dtype=np.float32))
    arrays = {"x": x[None], "w0": one, "out": np.zeros((1, 64), np.float32)}
    for cap in (0.5, 50.0):
        got = run(
            kernels.stages(Linear(1, Matrix(64, 64, 32), "float32", "float32", softcap=cap)), "f32", arrays
        )
        np.testing.assert_allclose(got["out"][0], cap * np.tanh(x.astype(np.float64) / cap), rtol=2e-6)
    (gated,) = kernels.pack(Matrix(128, 64, 32), np.eye(128, 64, dtype=np.float32))
    # the second matrix of the pair gives 1
    arrays |= {"w0": gated, "bias": np.repeat(np.float32([0, 1]), 64)}
    for gate, activation in ACTIVATIONS.items():
        job = Linear(1, Matrix(128, 64, 32), "float32", "float32", gate=gate, bias=True)
        got = run(kernels.stages(job), "f32", arrays)["out"][0]
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, activation(x.astype(np.float64)), rtol=2e-6, atol=1e-6)
