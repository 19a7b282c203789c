"""What a target offers the pipeline: weight layouts and kernels. One implementation per target folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from nearfar.targets.codes import BITS, pack_codes, unpack_codes

if TYPE_CHECKING:
    from tvm import tirx

Precision = Literal["f32", "f16"]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n, k] (n outputs, k inputs) as the kernels see it.

    `bits` is 2, 3, 4 or 8 for the affine layout (MLX: w = scale*q + bias per `group` inputs), 32 or 16 for dense
    float32/float16.
    """

    n: int
    k: int
    bits: int
    group: int = 0

    @property
    def quantized(self) -> bool:
        """Whether the matrix holds integers with scales and biases."""
        return self.bits in BITS


@dataclass(frozen=True)
class QuantTensor:
    """Quantized matrix in MLX's form: `words` uint32 [n, k*bits/32] (codes.py); `scales`, `biases` float16 [n, k/group]."""

    words: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    biases: npt.NDArray[np.float16]
    bits: int

    @staticmethod
    def of_codes(
        codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16], biases: npt.NDArray[np.float16], bits: int
    ) -> QuantTensor:
        """From codes uint8 [n, k]."""
        return QuantTensor(pack_codes(codes, bits), scales, biases, bits)

    @property
    def codes(self) -> npt.NDArray[np.uint8]:
        """The codes, one a byte: uint8 [n, k]."""
        return unpack_codes(self.words, self.bits)


@dataclass(frozen=True)
class Part:
    """One packed array of a matrix: the tensor `<param>.<name>` of the weight stream."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Linear:
    """out[m, n] = epilogue(x'[m, k] · Wᵀ): one fused matmul.

    `norm`: x' = rms_norm(x, eps) * norm_weight, else x' = x.
    `bias`: add bias[n]. `residual`: add residual[m, n]. `gated`: W has 2n rows (gate rows 0…n−1, then up rows), out = silu(gate) * up;
    so out has matrix.n/2 columns. `x_dtype`, `out_dtype`: "float32" or "float16".
    `rows`: gather: x has `x_rows` rows and an extra int32 [16] argument `logit_rows` picks row logit_rows[i] for out row i.
    PrimFunc params in order: x [x_rows or m, k]; logit_rows [16] if rows; norm_weight f32 [k] if norm; the matrix's parts;
    bias f32 [n] if bias; residual [m, n] (out_dtype) if residual; out [m, n or n/2]
    (for rows: out is the `logits` buffer [16, n], rows 0…m−1 written).
    """

    m: int
    matrix: Matrix
    x_dtype: str
    out_dtype: str
    norm: float | None = None
    bias: bool = False
    residual: bool = False
    gated: bool = False
    rows: bool = False
    x_rows: int = 0


@dataclass(frozen=True)
class Attention:
    """Shapes of the paged attention of M rows; `kv_dtype` "float32" or "float16"; q/out have dtype `dtype`.

    `qk_norm`: the epsilon of the norm of each head of q and k, where the model has one; only rope_append does it.
    """

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    slots: int
    pages_per_slot: int
    dtype: str
    kv_dtype: str
    scale: float
    qk_norm: float | None = None


@dataclass(frozen=True)
class Stage:
    """One launch of a several-stage kernel: `args` name the job's params, or `scratch:<i>` for buffers between the stages."""

    func: tirx.PrimFunc
    args: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """Launches in order, and the (shape, dtype) of each scratch buffer between them."""

    stages: tuple[Stage, ...]
    scratch: tuple[tuple[tuple[int, ...], str], ...] = ()


class Kernels(Protocol):
    """The kernels of one target. Each method gives the launches of one job with static shapes, exactly one kernel a stage.

    The job's param names, in order, are listed at each method; outputs come last.
    """

    precisions: tuple[Precision, ...]

    def activation_dtype(self, precision: Precision) -> str:
        """Dtype of activations between kernels other than the residual stream (which is float32 always)."""
        ...

    def parts(self, matrix: Matrix) -> tuple[Part, ...]:
        """The packed arrays of a matrix."""
        ...

    def pack(self, matrix: Matrix, tensor: QuantTensor | Array) -> tuple[Array, ...]:
        """Pack a matrix into its parts: QuantTensor where quantized, else a float array [n, k]."""
        ...

    def linear(self, job: Linear) -> Staged:
        """See `Linear`; params: x, [logit_rows], [norm], w0, w1, …, [bias], [residual], out."""
        ...

    def embed(self, m: int, matrix: Matrix) -> Staged:
        """Rows of the embedding: tokens i32 [256], w0…, out f32 [m, k]. (padding rows: any finite value)."""
        ...

    def rope_append(self, job: Attention, qk_norm: float | None) -> Staged:
        """Rotate q and k (half-split pairs: i with i+head_dim/2, as Hugging Face's llama), write k, v to the cache.

        Params: qkv [m, (heads+2*kv_heads)*head_dim] (dtype), positions i32 [256], slots i32 [256], page_table i32 [slots, pages_per_slot],
        rope f32 [context, head_dim], [q_norm f32 [head_dim], k_norm f32 [head_dim] if qk_norm], k_cache, v_cache
        (kv_dtype [pages, kv_heads, page_size, head_dim], written in place), q out [m, heads*head_dim] (dtype).
        """
        ...

    def attention(self, job: Attention) -> Staged:
        """Params: q [m, heads*head_dim], k_cache, v_cache, positions, slots, page_table, out [m, heads*head_dim].

        Row m attends to positions 0…positions[m] of slots[m]; padding rows (position −1) give zeros.
        """
        ...

    def greedy(self, rows: int, vocab: int) -> Staged:
        """See docs/artifact.md; params: logits [16, vocab], sample_i32 [16, 8], sampled [16], tokens [256]."""
        ...

    def sample(self, rows: int, vocab: int, slots: int) -> Staged:
        """Params: logits, sample_f32, sample_i32, logit_bias, counts, allowed, sampled, tokens."""
        ...

    def logprobs(self, rows: int, vocab: int) -> Staged:
        """Params: logits, sampled, logprob [16], top_ids [16, 20], top_logprobs [16, 20]."""
        ...
