"""Jobs on rows of activations: embedding, norm, and the matmul with everything fused into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nearfar.format.sizes import MAX_ROWS
from nearfar.kernels.quantized import Matrix
from nearfar.step.operation import Activation

from .names import Output, labelled, short
from .paged import Split


@dataclass(frozen=True)
class Embed:
    """out[i] = scale · row tokens[i] of the matrix, float32 [m, k]. Padding rows: any finite value.

    `first`, `of`: the matrix is the piece from row `first` on of a matrix with `of` rows (0: it is whole).
    Rows of out whose tokens are in other pieces keep their values.
    """

    kind: ClassVar = "embed"
    m: int
    matrix: Matrix
    scale: float = 1.0
    first: int = 0
    of: int = 0

    def inputs(self, parts: int) -> tuple[str, ...]:
        """The tokens int32 [256] and the matrix's parts."""
        return ("tokens", *(f"w{i}" for i in range(parts)))

    @property
    def out(self) -> Output:
        """float32 [m, k]."""
        return (self.m, self.matrix.k), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        return f"embed_m{self.m}_{self.matrix.label}"


@dataclass(frozen=True)
class Norm:
    """out = rms_norm(x, eps)·weight (+ residual): each of `groups` equal parts of a row is normalized
    separately.

    Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). `weight`: whether there is a weight,
    float32 [k/groups], the same for all groups, or with `each` [k]; without it the norm only scales. x,
    residual and out are float32 [m, k].
    """

    kind: ClassVar = "norm"
    m: int
    k: int
    eps: float
    weight: bool = True
    groups: int = 1
    residual: bool = False
    each: bool = False

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """The inputs x, [weight], [residual]."""
        return ("x", *["weight"] * self.weight, *["residual"] * self.residual)

    @property
    def out(self) -> Output:
        """float32 [m, k]."""
        return (self.m, self.k), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {f"g{self.groups}": self.groups > 1, "each": self.each, "residual": self.residual}
        return labelled(f"norm_m{self.m}_{self.k}", flags)


@dataclass(frozen=True)
class Linear:
    """out[m, n] = epilogue(x'[m, k] · Wᵀ): one fused matmul.

    `norm`: x' = rms_norm(x, eps) * norm_weight, else x' = x. `bias`: add bias[n]. `softcap`: then
    c·tanh(y/c). `residual`: add residual[m, n]. `gate`: W has 2n rows (gate rows 0…n−1, then up rows), out =
    activation(gate) * up, so out has matrix.n/2 columns. `x_dtype`, `out_dtype`: "float32" or "float16".
    `rows`: gather; x has `x_rows` rows, the int32 [16] argument `logit_rows` names row logit_rows[i] for out
    row i, and out is the `logits` buffer [16, n], of which rows 0…m−1 are written. `split`: x is attention's
    output in parts of `split_heads` heads, which the kernel joins first. `first`, `of`: the matrix is the
    piece from row `first` on of a matrix with `of` rows (0: it is whole); bias, residual and out have all
    `of` columns, and the piece's columns are written. A piece has no gate.
    """

    kind: ClassVar = "linear"
    m: int
    matrix: Matrix
    x_dtype: str
    out_dtype: str
    norm: float | None = None
    bias: bool = False
    residual: bool = False
    gate: Activation | None = None
    rows: bool = False
    x_rows: int = 0
    softcap: float | None = None
    split: Split | None = None
    split_heads: int = 0
    first: int = 0
    of: int = 0

    @property
    def columns(self) -> int:
        """The number of columns of the output that the job computes."""
        return self.matrix.n // 2 if self.gate else self.matrix.n

    @property
    def width(self) -> int:
        """The number of columns of the output."""
        return self.of or self.columns

    def inputs(self, parts: int) -> tuple[str, ...]:
        """The inputs in order: x [x_rows or m, k], [logit_rows [16]], [norm f32 [k]], the parts, [bias f32
        [n]], [residual (out_dtype)].

        With `split`, x is replaced by partial (see Split), positions int32 [256], [sinks f32 [split_heads]].
        """
        x = ("x",) if self.split is None else ("partial", "positions", *["sinks"] * self.split.sinks)
        head = (*x, *["logit_rows"] * self.rows, *["norm"] * (self.norm is not None))
        return (*head, *(f"w{i}" for i in range(parts)), *["bias"] * self.bias, *["residual"] * self.residual)

    @property
    def out(self) -> Output:
        """out_dtype [m, width], or [16, width] for logits."""
        return (MAX_ROWS if self.rows else self.m, self.width), self.out_dtype

    @property
    def label(self) -> str:
        """The kernel's name, such as `linear_m1_1536x576_q4g64_norm_silu`."""
        flags = {
            "norm": self.norm is not None,
            "bias": self.bias,
            "cap": self.softcap is not None,
            "residual": self.residual,
            str(self.gate): self.gate is not None,
            f"rows{self.x_rows}": self.rows,
            f"split{self.split.count if self.split else 0}": self.split is not None,
            f"x{short(self.x_dtype)}": self.x_dtype != "float32",
            f"o{short(self.out_dtype)}": self.out_dtype != "float32",
        }
        return labelled(f"linear_m{self.m}_{self.matrix.label}", flags)
