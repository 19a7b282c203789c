"""What kernels are asked to do: one frozen record a job, keyed by everything that the kernel depends on.

A job states once the order of its inputs (`inputs`), its output (`out`), and what its kernel is called
(`label`). Names of inputs: `x` rows of activations; `w0`, `w1`, … the packed parts of a matrix; the rest as
in the buffer table (format/buffers.py). Kernels take their inputs in this order, then `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nearfar.format.sizes import MAX_ROWS
from nearfar.step.ops import Activation
from nearfar.targets.quantized import Matrix

Output = tuple[tuple[int, ...], str]
"""Shape and dtype."""


def short(dtype: str) -> str:
    """As names of kernels have it: f32, f16."""
    return dtype.replace("float", "f")


def labelled(name: str, flags: Mapping[str, bool]) -> str:
    """A kernel's name with the flags that are set."""
    return "_".join([name, *(flag for flag, on in flags.items() if on)])


@dataclass(frozen=True)
class Embed:
    """out[i] = scale · row tokens[i] of the matrix, float32 [m, k]. Rows of padding: any finite value.

    `first`, `of`: the matrix is a piece of one of `of` rows (0: it is whole), from row `first` on; rows of
    out whose tokens are in other pieces stay as they are.
    """

    kind: ClassVar = "embed"
    m: int
    matrix: Matrix
    scale: float = 1.0
    first: int = 0
    of: int = 0

    def inputs(self, parts: int) -> tuple[str, ...]:
        """Tokens int32 [256], the matrix's parts."""
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
    """out = rms_norm(x, eps)·weight (+ residual): each of `groups` equal stretches of a row is normalized by
    itself.

    Zhang & Sennrich, "Root Mean Square Layer Normalization" (2019). `weight`: there is one, float32
    [k/groups], the same for all groups; without it the norm only scales. x, residual and out are float32 [m,
    k].
    """

    kind: ClassVar = "norm"
    m: int
    k: int
    eps: float
    weight: bool = True
    groups: int = 1
    residual: bool = False

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """x, [weight], [residual]."""
        return ("x", *["weight"] * self.weight, *["residual"] * self.residual)

    @property
    def out(self) -> Output:
        """float32 [m, k]."""
        return (self.m, self.k), "float32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {f"g{self.groups}": self.groups > 1, "residual": self.residual}
        return labelled(f"norm_m{self.m}_{self.k}", flags)


@dataclass(frozen=True)
class Split:
    """Attention between two launches: how the positions that a row sees are shared out, up to `count` parts.

    The positions make blocks of `block`, from the first that the row sees on; a part has ⌈blocks/count⌉ of
    them, so that short rows have fewer parts. The array is [m, heads, count, head_dim + TAIL] of the
    activations' dtype: a part's own attention, then the logarithm of its sum of exponentials as two numbers
    (of which the second is what rounding took from the first), then nothing. Of parts that a row does not
    have nothing is written and nothing may be read. `window`, `sinks`: as of Attend; sinks are not in parts.
    """

    TAIL: ClassVar = 4
    count: int
    block: int
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Linear:
    """out[m, n] = epilogue(x'[m, k] · Wᵀ): one fused matmul.

    `norm`: x' = rms_norm(x, eps) * norm_weight, else x' = x. `bias`: add bias[n]. `softcap`: then
    c·tanh(y/c). `residual`: add residual[m, n]. `gate`: W has 2n rows (gate rows 0…n−1, then up rows), out =
    activation(gate) * up; so out has matrix.n/2 columns. `x_dtype`, `out_dtype`: "float32" or "float16".
    `rows`: gather: x has `x_rows` rows and an extra int32 [16] argument `logit_rows` picks row logit_rows[i]
    for out row i; out is then the `logits` buffer [16, n], rows 0…m−1 written. `split`: x is attention's
    output in parts of `split_heads` heads, which are put together first. `first`, `of`: the matrix is a piece
    of one of `of` rows (0: it is whole), from row `first` on; bias, residual and out are those of all `of`
    columns, of which the piece's are written. A piece has no gate.
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
        """Columns of the output that are computed."""
        return self.matrix.n // 2 if self.gate else self.matrix.n

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.of or self.columns

    def inputs(self, parts: int) -> tuple[str, ...]:
        """In order x [x_rows or m, k], [logit_rows [16]], [norm f32 [k]], the parts, [bias f32 [n]],
        [residual (out_dtype)]. With `split`, for x: partial (see Split), positions int32 [256], [sinks f32
        [split_heads]].
        """
        x = ("x",) if self.split is None else ("partial", "positions", *["sinks"] * self.split.sinks)
        head = (*x, *["logit_rows"] * self.rows, *["norm"] * (self.norm is not None))
        return (*head, *(f"w{i}" for i in range(parts)), *["bias"] * self.bias, *["residual"] * self.residual)

    @property
    def out(self) -> Output:
        """out_dtype [m, width], or [16, width] of logits."""
        return (MAX_ROWS if self.rows else self.m, self.width), self.out_dtype

    @property
    def label(self) -> str:
        """Name of the kernel, such as `linear_m1_1536x576_q4g64_norm_silu`."""
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


@dataclass(frozen=True)
class Paged:
    """The shapes that attention and the append before it share: heads, and the paged cache of their layer."""

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    slots: int
    pages_per_slot: int
    dtype: str
    """Of q and the output."""
    kv_dtype: str
    """Of the cache: "float32" or "float16"."""

    @property
    def q_shape(self) -> tuple[int, int]:
        """[m, heads·head_dim]."""
        return self.m, self.heads * self.head_dim

    @property
    def _paged_label(self) -> str:
        return f"m{self.m}_h{self.heads}x{self.kv_heads}x{self.head_dim}_{short(self.kv_dtype)}"


@dataclass(frozen=True)
class RopeAppend(Paged):
    """Norms and rotation of q and k, by position; k and v of the rows go to the cache, q comes out.

    Steps, in order, each where it is asked for:
    1. `norm_eps`: RMS norm of q with q_norm and of k with k_norm, of each head by itself with weights
       [head_dim]; with `norm_all` over all heads of q (weights [heads·head_dim]) and all of k (weights
       [kv_heads·head_dim]). `norm_after`: after the rotation, not before it.
    2. `rope`: pairs (i, i + head_dim/2) are rotated by row positions[m] of the table: cosines, then sines.
    3. `q_scale` (beta, original): q·(1 + beta·ln(1 + ⌊position/original⌋)), as Ministral 3 does.
    4. `v_norm_eps`: RMS norm of each head of v, without weights.
    5. k and v are written to the cache (kv_dtype [pages, kv_heads, page_size, head_dim]), padding rows
       nowhere.
    Without `append` x holds q alone, [m, heads·head_dim]: the layer reads another layer's cache.
    """

    kind: ClassVar = "rope_append"
    rope: bool = True
    norm_eps: float | None = None
    norm_all: bool = False
    norm_after: bool = False
    v_norm_eps: float | None = None
    q_scale: tuple[float, float] | None = None
    append: bool = True

    @property
    def x_heads(self) -> int:
        """Heads in a row of x."""
        return self.heads + 2 * self.kv_heads * self.append

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """In order x [m, x_heads·head_dim] (dtype), positions, slots, page_table, [rope], [q_norm, [k_norm]],
        [k_cache, v_cache].

        positions, slots int32 [256]; page_table int32 [slots, pages_per_slot]; rope f32 [context, head_dim];
        norms f32. The caches are written in place. Without `append`: neither slots and page_table, nor
        k_norm, nor the caches.
        """
        where = ("positions", "slots", "page_table") if self.append else ("positions",)
        norms = ("q_norm", *["k_norm"] * self.append) if self.norm_eps is not None else ()
        return ("x", *where, *["rope"] * self.rope, *norms, *(("k_cache", "v_cache") if self.append else ()))

    @property
    def out(self) -> Output:
        """q: [m, heads·head_dim] of dtype."""
        return self.q_shape, self.dtype

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {
            "norope": not self.rope,
            "norm": self.norm_eps is not None,
            "all": self.norm_all,
            "after": self.norm_after,
            "vnorm": self.v_norm_eps is not None,
            "qscale": self.q_scale is not None,
            "q": not self.append,
        }
        return labelled(f"rope_append_{self._paged_label}", flags)


@dataclass(frozen=True)
class Rows:
    """What `Project` needs to know of the rows: one launch a step, for all layers alike in this.

    out: int32 [m, FACTS + head_dim], numbers as their bits: where in the cache the row's position lies,
    page·page_size + offset (-1: nowhere, it is padding, or nothing is appended); the factor of q (1.0 without
    `q_scale`); two zeros; with `rope` the row's cosines, then sines.
    """

    kind: ClassVar = "rows"
    FACTS: ClassVar = 4
    m: int
    head_dim: int
    """0: nothing is rotated."""
    page_size: int
    slots: int
    pages_per_slot: int
    append: bool
    q_scale: tuple[float, float] | None = None

    @staticmethod
    def of(job: RopeAppend) -> Rows:
        """Those of a job's rows."""
        return Rows(
            job.m, job.head_dim * job.rope, job.page_size, job.slots, job.pages_per_slot, job.append,
            job.q_scale,
        )  # fmt: skip

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """positions, [slots, page_table], [rope]: see RopeAppend."""
        return (
            "positions",
            *(("slots", "page_table") if self.append else ()),
            *["rope"] * bool(self.head_dim),
        )

    @property
    def out(self) -> Output:
        """int32 [m, FACTS + head_dim]."""
        return (self.m, self.FACTS + self.head_dim), "int32"

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {"append": self.append, "qscale": self.q_scale is not None}
        return labelled(f"rows_m{self.m}_{self.head_dim}", flags)


@dataclass(frozen=True)
class Project:
    """`paged` of what `linear` makes, in one: the projections to q, k and v that go where they belong.

    `vectors`: the small vectors of both jobs end to end in one tensor, or the one that there is: a kernel has
    few buffers. `rows`: what Rows makes of the step's rows.
    """

    kind: ClassVar = "project"
    linear: Linear
    paged: RopeAppend

    @property
    def m(self) -> int:
        """Rows."""
        return self.linear.m

    @property
    def vectors(self) -> dict[str, int]:
        """The vectors that stand in `vectors`, in order, with their lengths."""
        linear, paged, norms = self.linear, self.paged, self.paged.norm_eps is not None
        found = {
            "norm": linear.matrix.k * (linear.norm is not None),
            "bias": linear.matrix.n * linear.bias,
            "q_norm": paged.head_dim * (paged.heads if paged.norm_all else 1) * norms,
            "k_norm": paged.head_dim * (paged.kv_heads if paged.norm_all else 1) * (norms and paged.append),
        }
        return {name: length for name, length in found.items() if length}

    @property
    def starts(self) -> dict[str, int]:
        """Where each of them begins."""
        lengths = list(self.vectors.values())
        return {name: sum(lengths[:i]) for i, name in enumerate(self.vectors)}

    def inputs(self, parts: int) -> tuple[str, ...]:
        """X [m, k], the parts, [vectors f32], rows, [k_cache, v_cache]."""
        caches = ("k_cache", "v_cache") if self.paged.append else ()
        return ("x", *(f"w{i}" for i in range(parts)), *["vectors"] * bool(self.vectors), "rows", *caches)

    @property
    def out(self) -> Output:
        """q: [m, heads·head_dim] of paged.dtype."""
        return self.paged.out

    @property
    def label(self) -> str:
        """Name of the kernel: those of both jobs, without what they have in common."""
        paged = self.paged.label.removeprefix("rope_append_").removeprefix(f"m{self.m}_")
        return f"project_{self.linear.label.removeprefix('linear_')}_{paged}"


@dataclass(frozen=True)
class Attend(Paged):
    """Causal attention of the rows over their sequences' pages.

    Row i sees positions p ≤ positions[i] of slots[i], with `window` only the last `window` of them, its own
    included; pages before those may not be there, and are not read. Scores are scale·q·k; `softcap` c:
    c·tanh(score/c). `sinks`: f32 [heads], for each head one more logit in the softmax, which has no value.
    Padding rows give zeros. `split`: the output is left in parts, whose window is the job's.
    """

    kind: ClassVar = "attention"
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    split: Split | None = None

    def inputs(self, parts: int = 0) -> tuple[str, ...]:
        """q, k_cache, v_cache, positions, slots, page_table, [sinks]."""
        return ("q", "k_cache", "v_cache", "positions", "slots", "page_table", *["sinks"] * self.sinks)

    @property
    def out(self) -> Output:
        """[m, heads·head_dim] of dtype; its parts (see Split) with `split`."""
        if self.split is not None:
            return (self.m, self.heads, self.split.count, self.head_dim + Split.TAIL), self.dtype
        return self.q_shape, self.dtype

    @property
    def label(self) -> str:
        """Name of the kernel."""
        flags = {
            f"w{self.window}": self.window is not None,
            "cap": self.softcap is not None,
            "sinks": self.sinks,
            f"split{self.split.count if self.split else 0}": self.split is not None,
        }
        return labelled(f"attention_{self._paged_label}", flags)


@dataclass(frozen=True)
class OverLogits:
    """What jobs over rows of logits share: how many rows there are, and how long a row is."""

    kind: ClassVar[str]
    rows: int
    vocab: int

    @property
    def label(self) -> str:
        """Name of the kernel."""
        return f"{self.kind}_r{self.rows}_{self.vocab}"


@dataclass(frozen=True)
class Greedy(OverLogits):
    """sampled[i] = the best token of logits row i (docs/artifact.md, greedy)."""

    kind: ClassVar = "greedy"


@dataclass(frozen=True)
class Sample(OverLogits):
    """sampled[i] = a token drawn from logits row i (docs/artifact.md, sample)."""

    kind: ClassVar = "sample"
    slots: int


@dataclass(frozen=True)
class Logprobs(OverLogits):
    """Log probabilities of the sampled token and of the 20 likeliest (docs/artifact.md, logprobs)."""

    kind: ClassVar = "logprobs"


GraphJob = Embed | Norm | Linear | RopeAppend | Rows | Project | Attend
"""Jobs of a step; their arguments are the graph's tensors."""
SamplerJob = Greedy | Sample | Logprobs
"""Jobs beside the step; their arguments are buffers of the artifact, by name."""
Job = GraphJob | SamplerJob
