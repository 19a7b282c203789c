"""Jobs for the kernels that project, rotate and append in one launch, with inputs: see gpu_jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nearfar.kernels.contract import Packing
from nearfar.kernels.jobs import Linear, Project, RopeAppend, Rows
from nearfar.kernels.quantized import Matrix

from .gpu_inputs import paged_inputs
from .gpu_jobs import MATRICES, ROPES, SCALES_ALONE, SCHEMES, STORED, TABLED, TWO_LEVELS, paged
from .job_reference import Array, random_inputs, random_matrix, rows

Q4 = Matrix(0, 320, 4, 64)
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: ({"norm": 1e-5, "bias": index % 2 == 1}, flags)
    for index, (name, flags) in enumerate(ROPES.items())
    if not flags.get("norm_all")
}
"""Options of the projection, and of the rotation and append that follow."""
HEADS = ((1, 8, 4, 8), (4, 4, 2, 16), (1, 4, 1, 80), (2, 6, 2, 96), (3, 4, 2, 128), (1, 4, 1, 256))
HEADS += ((4, 2, 1, 512),)
BITS = ("q2g16", "q3g64", "q4g16", "q5g128", "q6g64", "q8g32")


def job(
    shape: tuple[int, int, int, int],
    dtype: str = "float32",
    matrix: Matrix = Q4,
    linear: dict[str, Any] | None = None,
    **flags: Any,
) -> Project:
    """A job of `shape` (rows, heads, kv heads, head size), with a matrix of as many columns as these need."""
    follows: RopeAppend = paged(RopeAppend, shape, dtype, **flags)
    wide = replace(matrix, n=follows.x_heads * follows.head_dim)
    return Project(Linear(shape[0], wide, "float32", dtype, **(linear or {})), follows)


def matrices() -> dict[str, Matrix]:
    """Matrices of all bits, and dense ones."""
    return {name: SCHEMES[name] for name in BITS} | {
        "f32": replace(MATRICES["f32odd"], k=172), "f16": MATRICES["f16"], "q8g32s": SCALES_ALONE["q8g32s"],
    } | {name: STORED[name] for name in ("q4g32k6o", "q6g16k8", *TABLED)}  # fmt: skip


def mixed(shape: tuple[int, int, int, int], dtype: str, **flags: Any) -> Project:
    """A job whose v is stored in another way than q and k, as in a file in Q4_K_M."""
    made = job(shape, dtype, linear={"norm": 1e-5, "bias": True}, **flags)
    v = made.paged.kv_heads * made.paged.head_dim
    wide, high = (replace(TWO_LEVELS[name], k=512) for name in ("q4g32k6o", "q6g16k8"))
    matrix = Matrix.of([replace(wide, n=made.linear.matrix.n - v), replace(high, n=v)])
    return replace(made, linear=replace(made.linear, matrix=matrix))


def arrays(packing: Packing, project: Project, seed: int = 1) -> dict[str, Array]:
    """Inputs of a job, with `out` and the numbers of the matrix; if there are several rows, the last is
    padding.
    """
    rng = np.random.default_rng(seed)
    linear, follows = project.linear, project.paged
    made = paged_inputs(follows, rng)
    facts = rows(Rows.of(follows), made)
    held = {**made, **random_inputs(linear, rng)}
    tensor, numbers = random_matrix(rng, linear.matrix)
    packed = packing.pack(linear.matrix, tensor)
    vectors = [held[name] for name in project.vectors]
    return {
        "x": held["x"],
        "w": numbers,
        "rows": facts,
        **{f"w{i}": array for i, array in enumerate(packed)},
        **({"vectors": np.concatenate(vectors)} if vectors else {}),
        **{name: made[name] for name in ("k_cache", "v_cache") if name in made},
    }
