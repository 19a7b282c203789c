"""Kernel names: readable, made from the job, so that they are the same in every build; not every field is in them (KernelTable)."""

from __future__ import annotations

from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.quantized import Matrix


def kernel_name(kind: str, job: Linear | Attention | Matrix, m: int) -> str:
    """For example `linear_m1_1536x576_q4g64_norm_gated`."""
    if isinstance(job, Matrix):
        return f"{kind}_m{m}_{_matrix(job)}"
    if isinstance(job, Attention):
        return f"{kind}_m{job.m}_h{job.heads}x{job.kv_heads}x{job.head_dim}_{_short(job.kv_dtype)}" + "_norm" * (job.qk_norm is not None)
    flags = {
        "norm": job.norm is not None,
        "bias": job.bias,
        "residual": job.residual,
        "gated": job.gated,
        f"rows{job.x_rows}": job.rows,
        f"x{_short(job.x_dtype)}": job.x_dtype != "float32",
        f"o{_short(job.out_dtype)}": job.out_dtype != "float32",
    }
    return "_".join([f"{kind}_m{job.m}_{_matrix(job.matrix)}", *(flag for flag, on in flags.items() if on)])


def _matrix(matrix: Matrix) -> str:
    scheme = f"q{matrix.bits}g{matrix.group}" if matrix.quantized else f"f{matrix.bits}"
    return f"{matrix.n}x{matrix.k}_{scheme}"


def _short(dtype: str) -> str:
    return dtype.replace("float", "f")
