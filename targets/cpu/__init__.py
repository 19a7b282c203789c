"""The CPU target: kernels in TIR, compiled by LLVM into one shared library with a small thread pool."""

from __future__ import annotations

from nearfar.errors import BuildError
from nearfar.targets.cpu import packing
from nearfar.targets.cpu.kernels import attention, embed, linear_dense, linear_quant, rope, sample, sampling, vec
from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.kernels import Precision, Staged
from nearfar.targets.quantized import Array, Matrix, Part, QuantTensor

__all__ = ["KERNELS", "CpuKernels"]


class CpuKernels:
    """nearfar.targets.base.Kernels for CPUs; float32 activations throughout."""

    precisions: tuple[Precision, ...] = ("f32",)

    def activation_dtype(self, precision: Precision) -> str:
        """Always float32."""
        return "float32"

    def parts(self, matrix: Matrix) -> tuple[Part, ...]:
        """See packing.parts."""
        return packing.parts(matrix)

    def pack(self, matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
        """See packing.pack."""
        return packing.pack(matrix, tensor)

    def linear(self, job: Linear) -> Staged:
        """See Kernels.linear."""
        if (job.x_dtype, job.out_dtype) != ("float32", "float32"):
            raise BuildError(f"the cpu target has float32 activations only, not {job.x_dtype} to {job.out_dtype}")
        kernel = linear_quant.linear if job.matrix.quantized else linear_dense.linear
        if job.gated and (job.matrix.n // 2) % packing.ROWS:
            return linear_dense.gated_by_parts(job, kernel)
        return kernel(job)

    def embed(self, m: int, matrix: Matrix) -> Staged:
        """See Kernels.embed."""
        return embed.embed(m, matrix)

    def rope_append(self, job: Attention, qk_norm: float | None) -> Staged:
        """See Kernels.rope_append."""
        _check(job)
        return rope.rope_append(job, qk_norm)

    def attention(self, job: Attention) -> Staged:
        """See Kernels.attention."""
        _check(job)
        return attention.attention(job)

    def greedy(self, rows: int, vocab: int) -> Staged:
        """See Kernels.greedy."""
        return sampling.greedy(rows, vocab)

    def sample(self, rows: int, vocab: int, slots: int) -> Staged:
        """See Kernels.sample."""
        return sample.sample(rows, vocab, slots)

    def logprobs(self, rows: int, vocab: int) -> Staged:
        """See Kernels.logprobs."""
        return sampling.logprobs(rows, vocab)


def _check(job: Attention) -> None:
    for name, value in (("head_dim", job.head_dim), ("page_size", job.page_size)):
        if value % vec.LANES:
            raise BuildError(f"the cpu target needs a {name} that is a multiple of {vec.LANES}, this model has {value}")
    if job.dtype != "float32":
        raise BuildError(f"the cpu target has float32 activations only, not {job.dtype}")


KERNELS = CpuKernels()
