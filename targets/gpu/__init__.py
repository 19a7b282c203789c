"""Kernels and weight layout that the GPU targets share (webgpu, vulkan): float32 and float16 over one set of weights."""

from __future__ import annotations

from nearfar.targets.jobs import Attention, Linear
from nearfar.targets.kernels import Kernels, Precision, Staged
from nearfar.targets.quantized import Array, Matrix, Part, QuantTensor

from . import packing
from .kernels.attention import attention
from .kernels.embed import embed
from .kernels.greedy import greedy
from .kernels.linear import linear
from .kernels.logprobs import logprobs
from .kernels.rope import rope_append
from .kernels.sampling import sample


class GpuKernels:
    """See nearfar.targets.base.Kernels."""

    precisions: tuple[Precision, ...] = ("f16", "f32")

    def __init__(self, *, vectors: bool = False) -> None:
        """`vectors`: for a target that loads four neighbours at once."""
        self._vectors = vectors

    def activation_dtype(self, precision: Precision) -> str:
        """Dtype of activations other than the residual stream."""
        return "float16" if precision == "f16" else "float32"

    def parts(self, matrix: Matrix) -> tuple[Part, ...]:
        """The packed arrays of a matrix."""
        return packing.parts(matrix)

    def pack(self, matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
        """Pack a matrix into its parts."""
        return packing.pack(matrix, tensor)

    def linear(self, job: Linear) -> Staged:
        """One launch."""
        return linear(job, self._vectors)

    def embed(self, m: int, matrix: Matrix) -> Staged:
        """One launch."""
        return embed(m, matrix)

    def rope_append(self, job: Attention, qk_norm: float | None) -> Staged:
        """One launch, two with the norm of q and k."""
        return rope_append(job, qk_norm)

    def attention(self, job: Attention) -> Staged:
        """Two launches for few rows (split, combine), else one."""
        return attention(job)

    def greedy(self, rows: int, vocab: int) -> Staged:
        """Two launches."""
        return greedy(rows, vocab)

    def sample(self, rows: int, vocab: int, slots: int) -> Staged:
        """Two launches."""
        return sample(rows, vocab, slots)

    def logprobs(self, rows: int, vocab: int) -> Staged:
        """One launch."""
        return logprobs(rows, vocab)


KERNELS: Kernels = GpuKernels()

__all__ = ["KERNELS", "GpuKernels"]
